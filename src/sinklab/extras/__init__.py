"""Beyond the papers. Each folder lists in ``PROVIDES`` the names it registers, and can be
deleted.
"""
