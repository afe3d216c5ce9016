"""Helpers that the samples share.

Each sample is one script for two processes, ``<sample>.py server PORT`` and ``<sample>.py client PORT``; each reads what
the other prints.
"""

import ctypes
import os
import sys

from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode

IS_SERVER = sys.argv[1] == "server"
PORT = int(sys.argv[2])
SERVER, CLIENT = 1, 2
HOSTS = dict(zip((SERVER, CLIENT), os.environ.get("SAMPLE_HOSTS", "127.0.0.1 127.0.0.1").split(), strict=True))
"""The two machines' addresses."""


def say(word):
    print(word, flush=True)


def hear(word):
    heard = input()
    assert heard == word, heard


def initialise(**options):
    """Return an initialised LLMDataDist; the server listens."""
    config = LLMConfig()
    config.device_id = 0 if IS_SERVER else 1
    config.enable_cache_manager = True
    config.sync_kv_timeout = 5000
    if IS_SERVER:
        config.listen_ip_info = f"{HOSTS[SERVER]}:{PORT}"
    for name, value in options.items():
        setattr(config, name, value)
    role, cluster_id = (LLMRole.PROMPT, SERVER) if IS_SERVER else (LLMRole.DECODER, CLIENT)
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def peer(cluster_id=SERVER, port=PORT):
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info(HOSTS[CLIENT if cluster_id == SERVER else SERVER], 0)
    info.append_remote_ip_info(HOSTS[cluster_id], port)
    return info


def link(datadist, *infos):
    status, each = datadist.link_clusters(list(infos) or [peer()], 5000)
    assert status == LLMStatusCode.LLM_SUCCESS, each


def unlink(datadist, *infos):
    status, each = datadist.unlink_clusters(list(infos) or [peer()], 5000)
    assert status == LLMStatusCode.LLM_SUCCESS, each


def status_of(call, *args):
    try:
        call(*args)
    except LLMException as error:
        return error.status_code
    return LLMStatusCode.LLM_SUCCESS


def write(address, contents):
    ctypes.memmove(address, contents, len(contents))


def read(address, nbytes):
    return ctypes.string_at(address, nbytes)


def stamp(owner, tensor, piece, nbytes):
    """Return contents that name their owner and their place."""
    return bytes([owner, tensor, piece, 0xA5]) * (nbytes // 4)
