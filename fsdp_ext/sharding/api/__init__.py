"""``fully_shard``, its arguments, and the methods of a sharded module."""
