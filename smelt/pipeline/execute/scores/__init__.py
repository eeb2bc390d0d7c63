"""A file for each kind of output (`TaskTraits.output`), whose `score_split` scores it."""
