"""A back end for tensors on the host whose kernels run on another device: one test body for CPU and GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from stepahead.kernels.cuda.backend import Launch


class MirrorBackend:
    """Copies what a launch names to the inner back end's device, runs it there, and copies everything back.

    Whole storages travel, so that views keep their strides and arguments that share memory still do.
    """

    def __init__(self, inner):
        self.inner = inner

    @property
    def device(self):
        return torch.device("cpu")

    def allocate(self, shape, dtype):
        memory = torch.empty(shape, dtype=dtype)
        memory.view(-1).view(torch.uint8).fill_(0xFF)
        return memory

    def copy(self, destination, source):
        destination.copy_(source)

    def upload(self, array, into=None):
        plain = torch.from_numpy(array)
        return plain.clone() if into is None else into.copy_(plain)

    def create_stream(self):
        return self.inner.create_stream()

    def record_event(self):
        return self.inner.record_event()

    def launch(self, launch: Launch):
        launch.check(self.device)
        storages, arguments = {}, []
        for argument in launch.arguments:
            if not isinstance(argument, torch.Tensor):
                arguments.append(argument)
                continue
            storage = argument.untyped_storage()
            if storage.data_ptr() not in storages:
                host = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages[storage.data_ptr()] = (host, host.clone().to(self.inner.device))
            there = storages[storage.data_ptr()][1].view(argument.dtype)
            arguments.append(there.as_strided(argument.shape, argument.stride(), argument.storage_offset()))
        self.inner.launch(replace(launch, arguments=tuple(arguments)))
        for host, there in storages.values():
            host.copy_(there)
