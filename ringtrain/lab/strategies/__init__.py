"""The same training under other strategies than ringtrain's: each is a function from a Training to what came of it."""
