"""Messages about memory: of the GPU, of the machine, and shared between processes."""

from __future__ import annotations

from ckptfix.explain.record import Advice, Record

MEMORY = (
    Record(
        name="gpu-memory",
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 7.79 GiB total"
        " capacity; 5.61 GiB already allocated)",
        patterns=(
            r"CUDA out of memory(?:\. Tried to allocate (?P<size>[\d.]+ [KMGT]i?B))?",
            r"CUDA error: out of memory",
            r"cuda runtime error \(2\)",
            r"C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED",
            r"(?:MPS|HIP|XPU)(?: backend)? out of memory(?:\. Tried to allocate (?P<size>[\d.]+ [KMGT]i?B))?",
        ),
        cause="The GPU's memory is full ({size} more was asked for). The file is not at fault, though loading it"
        " straight to the GPU needs room for the weights twice.",
        advice=(
            Advice("reads the file on the CPU first", code='torch.load({path}, map_location="cpu")'),
            Advice("keeps no gradients while you only predict", code="with torch.no_grad(): ..."),
            Advice("Halve the batch; then half precision. nvidia-smi shows what else is on the GPU."),
            Advice("shows how large the weights are", "ckptfix inspect {FILE}"),
        ),
        source="https://pytorch.org/docs/stable/notes/cuda.html#memory-management",
        codes=("FIL103",),
        unknown={"size": "some"},
    ),
    Record(
        name="machine-memory",
        example="RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate"
        " memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
        patterns=(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)(?:: you tried to allocate"
            r" (?P<size>\d+) bytes)?",
            r"^MemoryError\b",
            r"\[Errno 12\] Cannot allocate memory",
            r"std::bad_alloc",
            r"\$ Torch: not enough memory: you tried to allocate",
        ),
        cause="The machine's memory does not suffice ({size} bytes were asked for). An absurd number may come from a"
        " damaged file that claims a tensor of that size.",
        advice=(
            Advice(
                "shows how large the weights are, and whether the file is damaged; it reads no tensor",
                "ckptfix check {FILE} --no-values",
            ),
            Advice("reads tensors only when they are used", code='torch.load({path}, map_location="cpu", mmap=True)'),
            Advice(
                "writes parts that can be loaded one after another",
                "ckptfix repair {FILE} --shard-size 2GB -o parts.safetensors",
            ),
        ),
        source="https://pytorch.org/docs/stable/generated/torch.load.html",
        codes=("FIL2",),
        unknown={"size": "some"},
    ),
    Record(
        name="shared-memory",
        example="RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that"
        " dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        patterns=(
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Bus error",
            r"Unexpected bus error encountered in worker",
            r"insufficient shared memory",
            r"unable to (?:open|mmap|write to) (?:shared memory object|file) ?<?/torch_",
            r"received 0 items of ancdata",
            r"Too many open files(?!: ['\"/])",  # with the name of a file it is any program's
        ),
        cause="The workers of a DataLoader hand over their batches in shared memory (/dev/shm), or in open files, and"
        " there is no more of it; Docker gives 64 MB. The checkpoint is not concerned.",
        advice=(
            Advice("Start the container with --shm-size=8g or --ipc=host."),
            Advice("does without", code="DataLoader(..., num_workers=0)"),
            Advice(
                "uses files in place of descriptors", code='torch.multiprocessing.set_sharing_strategy("file_system")'
            ),
        ),
        source="https://pytorch.org/docs/stable/multiprocessing.html#sharing-strategies",
    ),
    Record(
        name="worker-died",
        example="RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly",
        patterns=(
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly",
            r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: (?P<signal>(?!Bus)\w+)",
        ),
        cause="A worker of the DataLoader died ({signal}): the machine ran out of memory, or the code that reads the"
        " data crashed. Its own message is above this one, or was lost. The checkpoint is not concerned.",
        advice=(
            Advice("runs that code in the main process, where its error shows", code="DataLoader(..., num_workers=0)"),
        ),
        source="https://pytorch.org/docs/stable/data.html",
        unknown={"signal": "its signal is not in this message"},
    ),
)
