/* softnpu.h: the software NPU's calls beyond the vendor's ABI: fault switches, adopted memory, counters.
 * Only tests, diagnosis and aiodatadist's device layer use them, and only if softnpu is the runtime in use.
 * Every call may be made from any thread.
 *
 * Environment, read by the first aclInit; a bad value makes it fail:
 *   SOFTNPU_DEVICES        number of devices: 1 to 64, default 8
 *   SOFTNPU_DEVICE_MEMORY  bytes of one device, which are only counted, not reserved: default 64 GiB
 *   SOFTNPU_MAX_STREAMS    most streams of one device, default streams included: default 1984
 *   SOFTNPU_INLINE_BYTES   work up to this size runs in the submitting thread if its stream is idle: default 256 KiB
 *   SOFTNPU_STRICT         `hccs`, `roce` or `aicpu`: refuse what HCCL refuses, and behave as it does between two cards of one A2
 *                          server, between two servers, or between two cards of an A3 super pod. Default: accept whatever
 *                          makes sense
 *                          all:  - a batch is walked item by item: a bad one ends the call, those before it run (roce: are posted)
 *                                - an item has at least 1 byte (HCCL_E_PARA), and local memory that is registered and bound
 *                                  (HCCL_E_INTERNAL)
 *                                - rank tables have version, status, the right server_count, server and device ids and unique
 *                                  addresses (HCCL_E_PARA), and this rank on this device (HCCL_E_UNAVAIL)
 *                                - one communicator from a rank table per device and process (HCCL_E_UNAVAIL); one-sided ones
 *                                  are not limited, but made by one thread at a time, while none destroys one (HCCL_E_INTERNAL)
 *                                - two processes on one device listen on two ports: device_port of the rank table, or 16666, unless
 *                                  HCCL_NPU_SOCKET_PORT_RANGE is set (HCCL_E_UNAVAIL)
 *                                - HcclRegisterGlobalMem is not counted; an unknown handle is HCCL_E_PARA
 *                                - aclrtStreamQuery reports failures only in a context that stops on failures
 *                                - HCCL_CONNECT_TIMEOUT is 120 to 7200 (HCCL_E_PARA); SOFTNPU_CONNECT_TIMEOUT may be less
 *                          hccs: - HOST memory of a peer is out of reach (HCCL_E_INTERNAL)
 *                                - a DEVICE region starts on a page: of 2 MiB, or of its aclrtMalloc allocation
 *                                  (HcclCommPrepare: HCCL_E_RUNTIME)
 *                                - bound HOST memory is from aclrtMallocHost (HcclCommPrepare: HCCL_E_RUNTIME)
 *                          aicpu: as hccs, but a batch is unfolded on the device (hccl_unfold.h) unless hcclOpExpansionMode is 1
 *                          or HCCL_OP_EXPANSION_MODE is HOST: its copies run on the communicator's own stream, an abort
 *                          stops none of them, one notify of the communicator reports all ends, two calls at once mix their
 *                          items, and HcclCommDestroy waits for that stream (HCCL_EXEC_TIMEOUT). With hccs so does AI_CPU
 *                          roce: HcclBatchGet and HcclBatchPut post their items into the connection's queue at once, the stream
 *                          only rings a doorbell, which starts whatever was posted before it. One flag per connection
 *                          tells that a batch ended; an abort takes nothing back that was posted; a failed request ends
 *                          the connection, and wakes no stream that waits (HCCL_EXEC_TIMEOUT); 510 unanswered requests make the next call wait (HCCL_CONNECT_TIMEOUT)
 *   SOFTNPU_COPIERS        threads that share a copy of some hundred KiB and more: 1 to 64. Default: four, or the number of
 *                            processors that this process may use, if that is less
 *   SOFTNPU_RENDEZVOUS     a folder of at most 50 characters in which processes of several network namespaces meet, for
 *                            instance of containers; they must still see each other's process ids
 *   SOFTNPU_CONNECT_TIMEOUT  seconds to wait for peers and room in queues, instead of HCCL_CONNECT_TIMEOUT: for tests
 *   SOFTNPU_FAULTS         faults from the start, see below                                                      */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Faults. A spec is `function:action`; several specs are separated by `;`:
 *   fail=CODE[@N]    the N-th call from now (default 1) returns CODE and does nothing;  @* = every call
 *   exec=CODE[@N]    the N-th call is accepted, and its task ends with CODE when it runs
 *   delay=MS[@N]     the task takes MS milliseconds longer; so does a call without a task
 *   flip=BYTE[@N]    of HcclBatchGet and HcclBatchPut: a bit of the BYTE-th byte that the call moved, counted through its items
 *                    from 0, or from -1 backwards, arrives wrong without a report; a BYTE beyond the first or the last means that one
 *   hang[@N]         the task never completes by itself; a stream abort ends it
 *   drop[@N]         a host callback is not run
 *   hold=NAME[@N]    the task waits before it runs, and a call without a task waits before it does anything, until the hold is
 *                    released. An abort does not end it: a task that was aborted meanwhile ends aborted when it is released
 *   half=NAME[@N]    a task that moves or fills memory waits in the middle: about half of its bytes have arrived, and more
 *                    arrive as soon as the hold is released, even if the task was aborted meanwhile
 * A call without a task is delayed before it does anything: `aclrtStreamAbort:delay=MS` is an abort as slow as the vendor's can be.
 * The function is the exported name, e.g. `HcclBatchGet:exec=507057@3`. The environment variable SOFTNPU_FAULTS holds
 * a spec that is applied at aclInit.                                                                            */
int  softnpu_fault(const char *spec);              /* 0, or -1: bad spec, nothing applied */
void softnpu_fault_clear(void);                    /* and releases every hold */

/* Holds. A NAME has 1 to 31 letters, digits, '-' and '_'. It exists from the spec that mentions it until it is released; several
 * faults may share one. At most 64 exist at a time. A child that was forked has none.                            */
int  softnpu_hold_arrivals(const char *name);      /* an eventfd of softnpu's that counts the arrivals; -1: no such hold */
int  softnpu_hold_release(const char *name);       /* all pass, now and later; 0, or -1: no such hold */
int  softnpu_set_memory_limit(uint64_t bytes);     /* per device; also SOFTNPU_DEVICE_MEMORY at aclInit */

/* Treats ordinary memory of this process as device memory (placement 1) or pinned host memory (0). A range may be adopted
 * several times: references are counted. To overlap another known range in part is an error.                       */
int softnpu_adopt(void *addr, uint64_t size, int placement);   /* 0, or an ACL error code */
int softnpu_release(void *addr, uint64_t size);
/* Returns 1 if a range is in memory of this process that has no file, so that a peer reaches it only through process_vm_readv
 * and process_vm_writev, which reach all memory of the process; otherwise 0. */
int softnpu_is_private(void *addr, uint64_t size);

/* Returns the hardware that softnpu imitates, from SOFTNPU_STRICT at aclInit: 0 none, 1 `hccs`, 2 `roce`, 3 `aicpu`. */
int softnpu_strictness(void);

/* softnpu's memory gets its pages with their first use, at 1 to 5 us each. Here they come earlier. softnpu_populate() returns when all
 * are there, or once *stop is not 0, if it is not NULL; ACL_ERROR_RT_MEMORY_ALLOCATION: the machine, or the container, would be left
 * less than an eighth of its memory. softnpu_populate_soon() leaves it to a thread that gives way to transfers, and goes on only
 * while that eighth is left. Freeing the memory ends it. Kernels before 5.14 populate nothing. */
int softnpu_populate(void *addr, uint64_t size, const int32_t *stop);
void softnpu_populate_soon(void *addr, uint64_t size);
uint64_t softnpu_present(void *addr, uint64_t size);   /* how many of these bytes have pages */
/* The files with the limit of this process's container, and with its statistics (memory.stat); empty: there is no limit. */
int softnpu_memory_group(const char *limit, const char *stat);

/* Work of at most this many bytes that the calling thread submits from now on runs in it, if its stream is idle, even if it is more
 * than SOFTNPU_INLINE_BYTES: for a thread that would only wait for it. With SOFTNPU_INLINE_BYTES=0 nothing runs so. Returns what was
 * said before, at first 0. */
uint64_t softnpu_run_here(uint64_t bytes);

/* Returns the number of threads that share a large copy, from SOFTNPU_COPIERS at aclInit or its default. */
int softnpu_copiers(void);

/* Ends an HcclCommPrepare or HcclExchangeMemDesc of the communicator with HCCL_E_NOT_FOUND, the one under way and any later
 * one. From then on the communicator can only be destroyed. Returns 0, or -1 if there is no such communicator or softnpu is
 * strict: the vendor's library cannot be told to stop waiting for a peer, so a strict softnpu cannot either. */
int softnpu_comm_cancel(void *comm);

/* Returns a file descriptor that becomes readable when HcclCommDestroy is worth another try, or -1 if nothing is waited for.
 * HcclCommDestroy returns HCCL_E_AGAIN while a peer was stopped in the middle of writing into memory of this process. The
 * descriptor tells that the peer has let go or has ended. It belongs to the communicator and is closed with it. */
int softnpu_comm_awaited(void *comm);
/* Destroys the communicator without waiting. The caller must make sure that memory which the peer may still write is not used
 * again. Returns 0, or -1 if HcclCommDestroy has not refused the communicator for that reason. */
int softnpu_comm_abandon(void *comm);
/* Says what peers may do with a bound region, before HcclCommPrepare: nothing (0; this end still copies from and to it), read
 * (1), or read and write (3, as without this call). A region to be read is handed over as a file that is open for reading only. Returns 0, or
 * -1 if the region is not bound to the communicator, or the communicator is prepared. HCCL has no such call. */
int softnpu_comm_show(void *comm, void *memHandle, int access);
/* Gets the RDMA traffic class and service level of a communicator. Returns 0, or -1 if there is no such communicator. */
int softnpu_comm_rdma(void *comm, uint32_t *traffic_class, uint32_t *service_level);

typedef struct softnpu_counters {
    uint64_t device_bytes, pinned_bytes;           /* allocated now */
    uint64_t allocations, adopted, imported;       /* live */
    uint64_t streams, events, contexts, comms;     /* live handles */
    uint64_t threads;                              /* workers alive now */
    uint64_t tasks_inline, tasks_queued;           /* since the process started */
    uint64_t bytes_copied;                         /* by streams and synchronous copies, since the process started */
    uint64_t sync_timeouts;                        /* synchronizes of streams, events and devices that ran into their time limit,
                                                      since the process started: each is a record in the vendor's error log */
    uint64_t races;                                /* calls that SOFTNPU_STRICT refused as a data race, since the process started */
} softnpu_counters;
void softnpu_get_counters(softnpu_counters *out);
