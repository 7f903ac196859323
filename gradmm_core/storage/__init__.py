"""Files of a root, in a local folder or an object store.

location: local paths and object store URLs behind one interface.
atomic: temporary files and folders, renamed when complete.
schemas: columns of every stage's Parquet.
artifacts: layout of the root, and reading and writing of stage outputs.
temporary_rows: rows of large data sets, in temporary files without a name.
hub: reading from the Hugging Face hub.
redaction: errors without private records.
"""
