"""Files that torch itself writes (zip, legacy, tar, package, TorchScript, export), and plain pickles."""
