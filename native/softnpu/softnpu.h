/* softnpu.h: what the software NPU offers beyond the vendor's ABI: fault switches, adopted memory, counters.
 * Only tests, diagnosis and aiodatadist's device layer use it, and only when softnpu is the runtime in use.
 * Every call may be made from any thread.
 *
 * Environment, read by the first aclInit; a bad value makes it fail:
 *   SOFTNPU_DEVICES        how many devices there are: 1 to 64, default 8
 *   SOFTNPU_DEVICE_MEMORY  bytes of one device; only counted, nothing is reserved: default 64 GiB
 *   SOFTNPU_MAX_STREAMS    of one device, default streams included: default 1984
 *   SOFTNPU_INLINE_BYTES   work up to this size runs in the submitting thread when its stream is idle: default 256 KiB
 *   SOFTNPU_STRICT         `hccs`, `roce` or `aicpu`: refuse what HCCL refuses, and do otherwise what it does otherwise, between
 *                          two cards of one A2 server, between two servers, or between two cards of an A3 super pod; default:
 *                          take whatever makes sense
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
 *                                - aclrtStreamQuery tells no failure, but in a context that stops on failures
 *                                - HCCL_CONNECT_TIMEOUT is 120 to 7200 (HCCL_E_PARA); SOFTNPU_CONNECT_TIMEOUT may say less
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
 *   SOFTNPU_COPIERS        threads that share a copy of some hundred KiB and more: 1 to 64; without it four, or the processors
 *                            that this process may use, if they are fewer
 *   SOFTNPU_RENDEZVOUS     a folder of at most 50 characters in which processes meet that are in several network namespaces,
 *                            as containers are; they still have to see each other's process ids
 *   SOFTNPU_CONNECT_TIMEOUT  seconds for which peers and room in queues are waited for instead of HCCL_CONNECT_TIMEOUT: for tests
 *   SOFTNPU_FAULTS         faults from the start, see below                                                      */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Faults. A spec is `function:action`, several are separated by `;`:
 *   fail=CODE[@N]    the N-th call from now (default 1) returns CODE and does nothing;  @* = every call
 *   exec=CODE[@N]    the N-th call is accepted, and its task ends with CODE when it runs
 *   delay=MS[@N]     the task takes MS milliseconds longer (a call without a task: the call does)
 *   flip=BYTE[@N]    of HcclBatchGet and HcclBatchPut: a bit of the BYTE-th byte that the call moved, counted through its items
 *                    from 0, or from -1 backwards, arrives wrong, and nothing says so; beyond the first or the last it is that one
 *   hang[@N]         the task never completes by itself; a stream abort ends it
 *   drop[@N]         a host callback is not run
 *   hold=NAME[@N]    the task stands still before it runs, and a call without a task before it does anything, until the hold is
 *                    released. An abort does not end it: a task that was aborted meanwhile ends aborted when it is released
 *   half=NAME[@N]    a task that moves or fills memory stands still in the middle: about half of its bytes have arrived, and more
 *                    arrive as soon as the hold is released, even if the task was aborted meanwhile
 * A call without a task is late before it does anything: `aclrtStreamAbort:delay=MS` is an abort as slow as the vendor's may be.
 * The function is the exported name, e.g. `HcclBatchGet:exec=507057@3`. The environment variable SOFTNPU_FAULTS holds
 * a spec that is applied at aclInit.                                                                            */
int  softnpu_fault(const char *spec);              /* 0, or -1: bad spec, nothing applied */
void softnpu_fault_clear(void);                    /* and releases every hold */

/* Holds. A NAME has 1 to 31 letters, digits, '-' and '_'. It exists from the spec that mentions it until it is released; several
 * faults may share one. At most 64 exist at a time. A child that was forked has none.                            */
int  softnpu_hold_arrivals(const char *name);      /* an eventfd, softnpu's, that counts those that came to stand there; -1: no such hold */
int  softnpu_hold_release(const char *name);       /* all pass, now and later; 0, or -1: no such hold */
int  softnpu_set_memory_limit(uint64_t bytes);     /* per device; also SOFTNPU_DEVICE_MEMORY at aclInit */

/* Ordinary memory of this process taken for device (placement 1) or pinned host (0) memory. Adopting one range twice
 * counts references; overlapping another known range in part is an error.                                         */
int softnpu_adopt(void *addr, uint64_t size, int placement);   /* 0, or an ACL error code */
int softnpu_release(void *addr, uint64_t size);

/* As which hardware it behaves, as SOFTNPU_STRICT said at aclInit: 0 as none, 1 `hccs`, 2 `roce`, 3 `aicpu`. */
int softnpu_strictness(void);

/* How many threads share a large copy, as SOFTNPU_COPIERS said at aclInit, or without it. */
int softnpu_copiers(void);

/* The vendor's library cannot be told to stop waiting for a peer, nor can softnpu when it is strict. Else this ends an
 * HcclCommPrepare or HcclExchangeMemDesc of the communicator with HCCL_E_NOT_FOUND, the one under way and any later one;
 * it can only be destroyed from then on. 0, or -1: it is strict, or there is no such communicator. */
int softnpu_comm_cancel(void *comm);

/* HcclCommDestroy says HCCL_E_AGAIN while a peer is in the middle of writing into memory of this process, and does not come out
 * of it: it was stopped. Then this is a file descriptor that becomes readable when destroying it is worth another try,
 * because the peer has let go or has ended. It is the communicator's, and closed with it. -1: nothing is waited for. */
int softnpu_comm_awaited(void *comm);
/* Destroys it without waiting: the caller has seen to it that memory which the peer may still write is not used again.
 * 0, or -1: it is not one that HcclCommDestroy refused for that reason. */
int softnpu_comm_abandon(void *comm);
/* The RDMA traffic class and service level that a communicator was made with. 0, or -1: there is no such communicator. */
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
