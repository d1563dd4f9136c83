"""What exists and what happened: schemas, database, files by content hash.

`catalog.models` and `catalog.trajectory` hold the frozen records that every room exchanges, `catalog.store`
the database, `catalog.blobs` the content-addressed files, `catalog.runs` the folders of runs.
"""
