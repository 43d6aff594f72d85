"""Who sends which slices to whom, from what each rank holds, lacks and where it runs."""
