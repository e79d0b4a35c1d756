def mutations():
    return []
