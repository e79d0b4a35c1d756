def check_versions(): pass
def optional_packages(): return ""
