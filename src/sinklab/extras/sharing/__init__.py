"""Models, runs and galleries for others: export, push, gallery."""
