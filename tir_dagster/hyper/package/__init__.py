"""The .tdsx package around a Hyper file."""
