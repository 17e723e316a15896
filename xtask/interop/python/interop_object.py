"""interop_object.py URL DIR: saves checkpoints on 4 ranks below a URL of S3, with each program that
writes there, and into folders of DIR what a reader must find in each.

The store is that of AWS_ENDPOINT_URL. interop_load.py loads from a URL.
"""
import os

import interop_common as common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interop_save import RANKS, dtensors, expect, fsdp2, plain, sharded_tensors


def s3torchconnector(url):
    """Its constructor has no endpoint, so its file system is replaced by one that has."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3FileSystem, S3StorageWriter

    region, config = os.environ["AWS_REGION"], S3ClientConfig(force_path_style=True)
    writer = S3StorageWriter(region, url, s3client_config=config)
    client = S3Client(region, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
    writer.fs = S3FileSystem(region, s3_client=client)
    return writer


def on_every_rank(rank, world, url, root):
    def both(name, state, writer=None):
        path = os.path.join(root, name)
        if rank == 0:
            os.makedirs(path)
        dist.barrier()
        # Without a writer, PyTorch chooses that of fsspec by the scheme.
        target = "%s/%s" % (url, name)
        dcp.save(state, **({"storage_writer": writer(target)} if writer else {"checkpoint_id": target}))
        expect(state, path)

    both("dtensors", dtensors())
    both("sharded_tensors", sharded_tensors(rank))
    both("plain", plain())
    both("fsdp2", fsdp2(common.device_mesh((4,), ("dp",))))
    both("s3torchconnector", dtensors(), s3torchconnector)


def everything(url, root):
    os.makedirs(root)
    common.on_ranks(on_every_rank, RANKS, url, root)


if __name__ == "__main__":
    common.main(everything)
