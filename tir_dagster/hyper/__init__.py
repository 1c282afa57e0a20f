"""The Hyper file: engine, purge and append, fingerprints, versions on disk, the .tdsx package and its refresh information."""
