"""The launch half: from a hostfile to ranks on every host. No TensorFlow; it runs on a login node."""
