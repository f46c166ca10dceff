"""What torch itself has written, one module each: zip, legacy, tar, package, TorchScript; and plain pickles."""
