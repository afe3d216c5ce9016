"""Two processes move ranges by address with hixl, in each of its ways, and find the bytes where they should be."""

import ctypes
import os
import sys
import time

import hixl

IS_SERVER, PORT = sys.argv[1] == "server", int(sys.argv[2])
BLOCK, BLOCKS = 16 * 1024, 512
SIZE = BLOCK * BLOCKS
FILL = 0xAA
HOSTS = os.environ.get("SAMPLE_HOSTS", "127.0.0.1 127.0.0.1").split()
SERVER = f"{HOSTS[0]}:{PORT}"


def say(word):
    print(word, flush=True)


def hear():
    word = sys.stdin.readline().strip()
    assert word, "the other end is gone"
    return word


def ended(engine, request):
    while True:
        status, state = engine.get_transfer_status(request)
        if state is not hixl.TransferStatus.WAITING:
            return status, state
        time.sleep(0.001)


def settled(engine, wanted):
    while engine.get_async_connect_status(SERVER) != (hixl.SUCCESS, wanted):
        time.sleep(0.001)


memory = ctypes.create_string_buffer(SIZE + (2 << 20))
address = (ctypes.addressof(memory) + (2 << 20) - 1) & -(2 << 20)
if IS_SERVER:
    ctypes.memset(address, FILL, SIZE)

engine = hixl.Hixl()
options = {hixl.OPTION_GLOBAL_RESOURCE_CONFIG: '{"connect_pool.thread_num": "1"}'}
assert engine.initialize(SERVER if IS_SERVER else f"{HOSTS[1]}:{PORT + 1}", options) == hixl.SUCCESS
status, handle = engine.register_mem(hixl.MemDesc(address, SIZE), hixl.MemType.MEM_DEVICE)
assert (status, handle > 0) == (hixl.SUCCESS, True)

if IS_SERVER:
    say(str(address))
    assert hear() == "written"
    notes = engine.get_notifies()
    assert notes[0] == hixl.SUCCESS
    assert [(note.name, note.notify_msg) for note in notes[1]] == [("written", "half")]
    assert ctypes.string_at(address, SIZE) == bytes([1]) * (SIZE // 2) + bytes([FILL]) * (SIZE // 2)
    say("seen")
    assert hear() == "disconnected"
else:
    remote = int(hear())
    assert engine.connect(SERVER, timeout_in_millis=5000) == hixl.SUCCESS
    assert engine.connect(SERVER) == hixl.ALREADY_CONNECTED
    ranges = [hixl.TransferOpDesc(address + i * BLOCK, remote + i * BLOCK, BLOCK) for i in range(BLOCKS)]
    assert engine.transfer_sync(SERVER, hixl.TransferOp.READ, ranges, timeout_in_millis=30000) == hixl.SUCCESS
    assert ctypes.string_at(address, SIZE) == bytes([FILL]) * SIZE
    ctypes.memset(address, 1, SIZE)
    status, request = engine.transfer_async(SERVER, hixl.WRITE, ranges[: BLOCKS // 2])
    assert status == hixl.SUCCESS
    assert ended(engine, request) == (hixl.SUCCESS, hixl.TransferStatus.COMPLETED)
    assert engine.send_notify(SERVER, hixl.NotifyDesc("written", "half"), 5000) == hixl.SUCCESS
    say("written")
    assert hear() == "seen"
    outside = [hixl.TransferOpDesc(address, remote + SIZE - 1, 2)]
    assert engine.transfer_sync(SERVER, hixl.READ, outside) == hixl.PARAM_INVALID
    assert engine.disconnect(SERVER, timeout_in_millis=5000) == hixl.SUCCESS
    assert engine.transfer_sync(SERVER, hixl.READ, ranges) == hixl.NOT_CONNECTED
    assert engine.connect_async(SERVER, 5000) == hixl.SUCCESS
    settled(engine, hixl.CONNECTED)
    assert engine.transfer_sync(SERVER, hixl.READ, ranges, 30000) == hixl.SUCCESS
    assert engine.disconnect_async(SERVER, 5000) == hixl.SUCCESS
    settled(engine, hixl.NOT_CONNECT)
    say("disconnected")
while engine.deregister_mem(handle) != hixl.SUCCESS:  # the server's end of the connection ends a moment later
    time.sleep(0.001)
engine.finalize()
