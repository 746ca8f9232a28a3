"""`insitu tasks`: list, show and validate the tasks of a data set."""
