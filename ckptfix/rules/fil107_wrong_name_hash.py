"""FIL107 wrong-name-hash: the file's name has a hash, and its content another one.

## What it finds
`ckptfix migrate` hashes every file. Where a name ends as those of torch.hub, torchvision and timm do, with `-` and 8 or
more digits in hex before the suffix, these are the first digits of the content's sha256. The finding is that they
are not. What hardly is a hash is passed over: numbers (dates, steps), words, and 32 or 40 digits, as md5, uuids and
commits have.

`check` and `repair` do not look, since it takes a pass over the whole file; `sha256sum FILE` says the same.

## Why it matters
The file was changed since it was named, was damaged on its way, or was given the name of another. What it holds may be
whole all the same. `torch.hub.load_state_dict_from_url(check_hash=True)` and timm refuse it.

## Fix safety
There is no fix for the content. `migrate` gives each file that it writes the hash of what is in it, in the same length,
and `renames.json` maps old names to new ones.

## Example
    FIL107 the name says that the sha256 begins with 19c8e357, and it begins with 0b4c1a2e

## Sources
- https://pytorch.org/docs/stable/hub.html#torch.hub.load_state_dict_from_url: `filename-<sha256>.ext`
- https://github.com/huggingface/pytorch-image-models/blob/main/clean_checkpoint.py: writes such names"""
