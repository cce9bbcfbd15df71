"""Jobs: the rows of prompt files, the journal of results, output folders and reports."""
