"""`ringtrain data`: files of rows, as `ringtrain.Records` reads them.

show:    their blocks, columns and first rows
index:   an index next to each file, for files behind URLs
convert: the same rows as Parquet
"""
