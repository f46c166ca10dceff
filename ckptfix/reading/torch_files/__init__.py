"""What torch itself writes: zip, legacy, tar, package and TorchScript; and plain pickles."""
