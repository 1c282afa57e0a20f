"""What real servers do where no document says so: `tir probe-server` asks them."""
