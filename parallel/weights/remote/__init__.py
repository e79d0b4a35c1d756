"""Models that are not local folders: hub names and URLs become folders of a cache.

A URL's weights arrive while they are read: `arriving` fetches the parts of a file that a rank asks for.
"""
