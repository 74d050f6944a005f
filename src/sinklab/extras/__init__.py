"""Beyond the papers. Each folder says in ``PROVIDES`` what it registers, and can be deleted."""
