"""FIL107 wrong-name-hash: the hash in the file's name does not match its content.

## What it finds
`ckptfix migrate` hashes every file. If a name has `-` and 8 or more hex digits before the suffix, as in torch.hub,
torchvision and timm, these should be the first digits of the content's sha256. It is a finding if they are not.
Numbers (dates, steps), words, and 32 or 40 digits (md5, uuids, commits) are ignored.

`check` and `repair` skip this, because it takes a pass over the whole file; use `sha256sum FILE` instead.

## Why it matters
The file was changed after it was named, was damaged in transfer, or got another file's name. Its content may still be
intact. `torch.hub.load_state_dict_from_url(check_hash=True)` and timm refuse it.

## Fix safety
There is no fix for the content. `migrate` gives each file that it writes the hash of its content, in the same length,
and `renames.json` maps old names to new ones.

## Example
    FIL107 the name says that the sha256 begins with 19c8e357, but it begins with 0b4c1a2e

## Sources
- https://pytorch.org/docs/stable/hub.html#torch.hub.load_state_dict_from_url: `filename-<sha256>.ext`
- https://github.com/huggingface/pytorch-image-models/blob/main/clean_checkpoint.py: writes such names"""
