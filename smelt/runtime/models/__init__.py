"""Models in torch: their files, their structure, how they are made, read and written."""
