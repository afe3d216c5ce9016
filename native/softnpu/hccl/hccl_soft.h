/* hccl_soft.h: declarations that the files of softnpu's HCCL half share. None is part of the vendor's ABI.
 *
 *   hccl_config.c     HcclCommConfig, environment, data types        hccl_region.c     our memory: register, bind
 *   hccl_json.c       a small strict JSON reader                     hccl_bind.c       what a communicator shows
 *   hccl_ranktable.c  how many ranks, and which key they share       hccl_remote.c     a peer's memory: import, look up
 *   hccl_comm.c       the communicator object and its life           hccl_swap.c       telling each other about memory
 *   hccl_init.c       the ways to make one                           hccl_prepare.c    HcclCommPrepare
 *   hccl_wait.c       a deadline that a destroy can cut short        hccl_memdesc.c    the older, per-peer descriptors
 *   hccl_socket.c     abstract names, peers of our own user          hccl_onesided.c   BatchPut/Get: checks, submission
 *   hccl_message.c    framed messages with file descriptors          hccl_copy.c       BatchPut/Get: the task
 *   hccl_mesh.c       every rank finds every other                   hccl_channel.c    one send or receive, step by step
 *   hccl_info.c       getters, error texts, groups                   hccl_sendrecv.c   Send, Recv, Barrier
 *   hccl_init_all.c   the one in which no ranks meet              hccl_destroy.c    the end, once no peer can write any longer
 *   hccl_unfold.c     batches that are unfolded on the device   hccl_gate.c       who is in the middle of writing
 *
 * hccl_queue_pair.h declares what differs between two servers (SOFTNPU_STRICT=roce), hccl_strict_*.c refuses what HCCL refuses.
 *
 * A pair of ranks shares a *link* (a SEQPACKET socket: set-up messages, and the news that the peer is gone) and, unless the
 * communicator is one-sided, two *channels* (STREAM sockets, one per direction of HcclSend). A one-sided link is one file
 * descriptor per process, so that hundreds of them are cheap.
 *
 * Lock order: communicator < region table < what soft.h says. A set-up call that fails breaks its link on purpose: both
 * sides then start again from a fresh one, and no half-read message is ever mistaken for a new one.                     */
#pragma once
#include <sys/types.h>
#include "soft.h"

#define HCCL_RANKS_MAX    64
#define HCCL_NAME_BYTES   128
#define HCCL_TABLE_BYTES  (1u << 20)                    /* rank table text */
#define HCCL_REGIONS_MAX  65536                         /* that one peer may describe; vm.max_map_count is the same */
#define HCCL_BATCH_MAX    256
#define HCCL_PIECE        ((uint64_t)1 << 20)           /* how much is copied between two looks at abort and peer */

/* What the gate says is returned as it is; ACL codes (a forked child) become the HCCL code for "the runtime failed". */
#define HCCL_ENTER() HCCL_ENTER_TASK(NULL)
#define HCCL_ENTER_TASK(exec) \
    HCCL_ENTER_AS(__func__, exec)
#define HCCL_ENTER_AS(function, exec)                                                            \
    do {                                                                                         \
        int code_ = soft_fault(function, exec);                                                  \
        if (code_) return code_ >= ACL_ERROR_INVALID_PARAM ? HCCL_E_RUNTIME : (HcclResult)code_; \
    } while (0)

/* ---- hccl_wait.c: blocking calls. These report nothing; hccl_wait_failed() puts their code into words. ---- */
typedef struct hccl_wait {
    const char *function;
    int64_t deadline;                                   /* soft_now_ns(); INT64_MAX = never */
    int cancel;                                         /* readable when the communicator is destroyed or called off; or -1 */
} hccl_wait;
HcclResult hccl_wait_fd(const hccl_wait *wait, int fd, short events); /* 0, E_TIMEOUT, E_NOT_FOUND (cancelled), E_SYSCALL */
HcclResult hccl_wait_pause(const hccl_wait *wait, int ms);
HcclResult hccl_wait_failed(const hccl_wait *wait, uint32_t rank, HcclResult code);

/* ---- hccl_config.c ---- */
typedef struct hccl_config {
    char name[HCCL_NAME_BYTES];                         /* "": none was given */
    bool world;                                         /* hccl_comm.world */
    uint32_t port;                                      /* hccl_place.port */
    uint32_t traffic_class, service_level;              /* of RDMA: given, the environment's, or the vendor's */
    bool unfolds;                                       /* hccl_comm.unfolds */
} hccl_config;
HcclResult hccl_config_read(const char *function, const HcclCommConfig *given, hccl_config *config); /* NULL: nothing */
HcclResult hccl_connect_deadline(const char *function, int seconds, int64_t *deadline); /* 0: the environment's, -1: never */
int64_t    hccl_exec_deadline(void);
bool       hccl_bytes(uint64_t count, HcclDataType type, uint64_t *bytes);  /* false: bad type, or overflow */

/* ---- hccl_json.c, hccl_ranktable.c ---- */
typedef struct hccl_json { const char *at, *end; int depth; } hccl_json;
typedef bool hccl_json_item(hccl_json *json, const char *key, size_t length, void *context); /* must consume the value */
bool hccl_json_object(hccl_json *json, hccl_json_item *item, void *context);
bool hccl_json_array(hccl_json *json, hccl_json_item *item, void *context);  /* key is NULL */
bool hccl_json_string(hccl_json *json, const char **text, size_t *length);   /* between the quotes, escapes as they are */
bool hccl_json_skip(hccl_json *json);                                        /* any value */
bool hccl_json_end(hccl_json *json);                                         /* nothing but space is left */

typedef struct hccl_key { uint64_t word[2]; } hccl_key; /* what the ranks of one communicator have in common */
void       hccl_key_add(hccl_key *key, const void *bytes, size_t length);
typedef struct hccl_place { uint32_t ranks, port; } hccl_place;    /* port: of this rank's device; 0: the table names none */
HcclResult hccl_rank_table(const char *function, const char *text, size_t length, uint32_t rank, hccl_place *place,
                           hccl_key *key);

/* ---- hccl_region.c, hccl_bind.c: memory of this process that may be shown to peers ---- */
typedef struct hccl_region {
    soft_object object;
    void *handle;
    uint64_t id;                                        /* never used twice in this process */
    CommMem mem;
    bool adopted;                                       /* unknown to softnpu before, released with the region */
    uint32_t registrations, bindings;                   /* under the table's lock */
    bool global;                                        /* likewise; HcclRegisterGlobalMem's, which SOFTNPU_STRICT counts once */
    struct hccl_region *next;
} hccl_region;
HcclResult hccl_region_acquire(const char *function, const CommMem *mem, hccl_region **region); /* registers; a reference */
HcclResult hccl_region_release(const char *function, hccl_region *region);  /* deregisters; the reference stays */
bool       hccl_region_bind(hccl_region *region);       /* false: no longer registered. Takes a reference. */
void       hccl_region_unbind(hccl_region *region);

typedef struct hccl_regions { hccl_region **item; size_t count, capacity; } hccl_regions;       /* bound ones */
bool hccl_regions_add(hccl_regions *regions, hccl_region *region);          /* false: no memory */
bool hccl_regions_remove(hccl_regions *regions, const hccl_region *region); /* the last such; false: not in it */
bool       hccl_regions_contain(const hccl_regions *regions, const hccl_region *region);
bool hccl_regions_copy(const hccl_regions *from, hccl_regions *to);         /* with references, not bindings */
void hccl_regions_drop(hccl_regions *copy);
void hccl_regions_clear(hccl_regions *regions, bool release);               /* unbinds all; release: deregisters, too */

/* ---- hccl_strict_*.c: what HCCL demands besides (SOFTNPU_STRICT); each file names its source ---- */
HcclResult hccl_strict_item(const char *function, const hccl_regions *bound, const hccl_regions *offered, uint32_t number,
                            const void *local, uint64_t bytes);
HcclResult hccl_strict_table(const char *function, const char *text, size_t length, uint32_t rank, uint32_t *port); /* of JSON */
HcclResult hccl_strict_world_take(const char *function, int device);   /* for its one rank-table communicator */
void       hccl_strict_world_give(int device);
HcclResult hccl_strict_init_enter(const char *function);               /* one-sided; 0: to be left */
void       hccl_strict_init_leave(void);
HcclResult hccl_strict_destroy_enter(const char *function);            /* likewise */
void       hccl_strict_destroy_leave(void);
bool       hccl_strict_hides(const hccl_region *region);
HcclResult hccl_strict_pages(const char *function, const hccl_regions *bound);
HcclResult hccl_strict_pinned(const char *function, const hccl_regions *bound);

/* ---- hccl_remote.c: memory of a peer. The table is changed under the communicator's lock. ---- */
typedef struct hccl_remote {
    uint64_t id, base, size;
    int type;
    bool enabled;                                       /* may be transferred to and from */
    bool readable;                                      /* but not written: its mapping is read-only, too */
    void *local;                                        /* where we have mapped `base`; NULL: reached by process_vm_* */
} hccl_remote;
typedef struct hccl_remotes { hccl_remote *item; size_t count, capacity; } hccl_remotes;  /* ordered by base, no overlap */

/* ---- hccl_gate.c: side 0 is the lower rank of a link, side 1 the higher ---- */
typedef struct hccl_gate {
    atomic_uint shut;                                   /* by either end: no writer goes in any longer */
    atomic_uint writing[2];                             /* pieces that a side is copying into the other's memory */
} hccl_gate;
int        hccl_gate_new(void);                         /* a file descriptor for both ends to map, or -1 */
hccl_gate *hccl_gate_map(int fd);                       /* NULL: it is no such thing. `fd` stays the caller's. */
void       hccl_gate_unmap(hccl_gate *gate);            /* or NULL */
bool       hccl_gate_enter(hccl_gate *gate, int side);  /* false: shut. To be left either way. */
void       hccl_gate_leave(hccl_gate *gate, int side, int link);
void       hccl_gate_shut(hccl_gate *gate);
bool       hccl_gate_busy(const hccl_gate *gate, int side);
void       hccl_gate_clear(const hccl_gate *gate, int side); /* waits until our own side is out */

/* ---- hccl_comm.c ---- */
typedef struct hccl_channel { int fd; atomic_bool busy; } hccl_channel;
typedef struct hccl_peer {
    int link;                                           /* -1: never linked; one that hung up stays until it is replaced */
    pid_t pid;
    int process;                                        /* a pidfd, once we wait for it to let go; or -1 */
    hccl_gate *gate;                                    /* of the link; NULL: never linked */
    hccl_channel send, recv;
    struct hccl_queue_pair *queue_pair;                 /* SOFTNPU_STRICT=roce, once a request was posted; or NULL */
    hccl_remotes remotes;
    hccl_regions offered;                               /* HcclRegisterMem */
} hccl_peer;
typedef struct hccl_comm {
    soft_object object;
    pthread_mutex_t lock;
    HcclComm handle;
    hccl_key key;
    char name[HCCL_NAME_BYTES];
    int device;
    uint32_t rank, size;
    uint32_t traffic_class, service_level;              /* nothing here sends packets: for softnpu_comm_rdma */
    bool one_sided, prepared, suspended, closed, destroyed;
    bool unfolds;                                       /* its batches are unfolded on the device (SOFTNPU_STRICT=aicpu) */
    struct hccl_unfolding *unfolding;                   /* likewise, once there was a batch; or NULL */
    struct hccl_adapter_port *port;                     /* that it listens on (SOFTNPU_STRICT), or NULL */
    bool world;                                         /* made from a rank table: SOFTNPU_STRICT allows one of a device */
    bool setting_up;                                    /* a thread is inside Prepare or ExchangeMemDesc */
    bool called_off;                                    /* by softnpu_comm_cancel: no set-up call waits for a peer any longer */
    int cancel;                                         /* that thread's eventfd */
    int watch;                                          /* an epoll of what says that peers let go; -1: no peer is waited for */
    uint32_t tasks;                                     /* queued or running */
    hccl_regions bound;
    hccl_regions hidden, readable;                      /* of these, by softnpu_comm_show: marks only, no references */
    struct hccl_comm *next;                             /* live one-sided communicators */
    hccl_peer peers[];
} hccl_comm;
hccl_comm *hccl_comm_new(uint32_t size, uint32_t rank, const hccl_config *config, const hccl_key *key);
HcclResult hccl_comm_publish(const char *function, hccl_comm *comm, HcclComm *handle); /* takes over the reference */
HcclResult hccl_comm_find(const char *function, HcclComm handle, hccl_comm **comm);    /* a new reference */
void       hccl_comm_put(hccl_comm *comm);
void       hccl_comm_forget(const hccl_comm *comm);                            /* its name may be used again */
static inline int hccl_side(const hccl_comm *comm, uint32_t rank) { return comm->rank > rank; } /* ours, of the link to it */
HcclResult hccl_comm_hold(const char *function, hccl_comm *comm);              /* counts a task in, unless closed */
void       hccl_comm_release(hccl_comm *comm);                                 /* counts it out */
HcclResult hccl_strict_port_take(const char *function, hccl_comm *comm, uint32_t port); /* 0: the default */
void       hccl_strict_port_give(hccl_comm *comm);                             /* or there is none */
HcclResult hccl_setup_begin(hccl_comm *comm, hccl_wait *wait);                 /* one set-up call at a time */
HcclResult hccl_setup_end(hccl_comm *comm, hccl_wait *wait, HcclResult code);  /* passes the code on, unless destroyed */

/* ---- hccl_socket.c: -1 and errno, as the system calls ---- */
int  hccl_socket_listen(const hccl_key *key, uint32_t rank);
int  hccl_socket_connect(const hccl_key *key, uint32_t rank);
bool hccl_socket_ours(int fd, pid_t *pid);              /* the other end belongs to our user */
bool hccl_socket_alive(int fd);

/* ---- hccl_message.c ---- */
enum { HCCL_HELLO = 1, HCCL_REGIONS, HCCL_DESCRIPTORS, HCCL_STATUS };
enum { HCCL_LAST = 1, HCCL_PREPARE = 2, HCCL_EXCHANGE = 4 };
#define HCCL_MAGIC               0x534e4833u            /* changes whenever the layout of messages does */
#define HCCL_MESSAGE_REGIONS     64
#define HCCL_MESSAGE_DESCRIPTORS 32
typedef struct hccl_head { uint32_t magic; uint16_t kind, flags; uint32_t count; int32_t status; } hccl_head;
typedef struct hccl_hello { hccl_key key; uint32_t from, to, ranks, one_sided; } hccl_hello;
enum { HCCL_SHARED = 1, HCCL_READABLE = 2 };            /* behind a file; to be read only */
typedef struct hccl_wire_region { uint64_t id, base, size, fd_offset; int32_t type; uint32_t shared; } hccl_wire_region;
typedef struct hccl_message {
    hccl_head head;
    union {
        hccl_hello hello;
        hccl_wire_region regions[HCCL_MESSAGE_REGIONS];
        HcclMemDesc descriptors[HCCL_MESSAGE_DESCRIPTORS];
    } body;
    int nfds, fds[HCCL_MESSAGE_REGIONS];                /* received ones are the caller's */
} hccl_message;
void       hccl_message_init(hccl_message *message, uint16_t kind, uint16_t flags, uint32_t count);
/* Both return E_UNAVAIL when the peer hung up; receiving also E_INTERNAL for a malformed message, or the peer's own code. */
HcclResult hccl_message_send(const hccl_wait *wait, int fd, const hccl_message *message);
HcclResult hccl_message_receive(const hccl_wait *wait, int fd, uint16_t kind, uint16_t flags, hccl_message *message);
void       hccl_message_close(hccl_message *message);                            /* the descriptors in it */
HcclResult hccl_message_confirm(const hccl_wait *wait, int fd, HcclResult mine); /* both are content, or both learn of it */

/* ---- hccl_mesh.c; `only` is one rank, or -1 for all ---- */
HcclResult hccl_mesh_connect(hccl_comm *comm, const hccl_wait *wait, int64_t only);
HcclResult hccl_mesh_install(hccl_comm *comm, uint32_t rank, int link, pid_t pid, hccl_gate *gate, const int channels[2]);
                                                                                 /* takes them over */
void       hccl_mesh_break(hccl_comm *comm, int64_t only);

/* ---- hccl_remote.c, hccl_swap.c ---- */
HcclResult   hccl_remote_add(hccl_comm *comm, uint32_t rank, const hccl_wire_region *wire, int fd, bool enable);
hccl_remote *hccl_remote_find(const hccl_remotes *remotes, uint64_t base, uint64_t size); /* in which the range lies */
void         hccl_remotes_clear(hccl_remotes *remotes);
HcclResult   hccl_swap(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, const hccl_regions *mine, uint16_t purpose);

/* ---- hccl_flip.c: what the fault `flip` does ---- */
uint64_t hccl_flip_place(int64_t at, uint64_t bytes);    /* among the bytes that a call moved, at least 1 */
aclError hccl_flip(void *address, pid_t pid);            /* the byte at an address of a process arrives wrong */

/* ---- hccl_copy.c ---- */
typedef struct hccl_copy {
    char *local;
    uint64_t remote;                                    /* an address here if mapped, else in the peer */
    uint64_t bytes;
    uint64_t local_range, remote_range;                 /* where the ranges start that they lie in */
    bool mapped;
} hccl_copy;
typedef struct hccl_transfer {
    soft_task task;
    hccl_comm *comm;
    uint32_t rank;                                      /* the peer: */
    int link;
    pid_t pid;
    hccl_gate *gate;
    bool put, held;                                     /* held: counted in by hccl_comm_hold */
    bool outlives;                                      /* its caller may forget it, and its memory: no fault of this process */
    uint32_t count;
    hccl_copy copies[];
} hccl_transfer;
hccl_transfer *hccl_transfer_new(uint32_t capacity);
void           hccl_transfer_add(hccl_transfer *transfer, hccl_copy copy); /* joins it to the last one where both touch */
void           hccl_transfer_drop(soft_task *task);

/* ---- hccl_channel.c ---- */
typedef struct hccl_offer { uint32_t magic, barrier; uint64_t bytes; } hccl_offer;
typedef struct hccl_answer { uint32_t magic; int32_t status; } hccl_answer;
typedef struct hccl_op {
    hccl_channel *channel;
    uint32_t rank;
    int32_t after;                                      /* index of the operation before this one on its channel, or -1 */
    bool sending, barrier, claimed, finished;
    short watched;                                      /* the events that its task's epoll waits for, or 0 */
    char *buffer;
    uint64_t bytes;
    int step;
    uint64_t moved;                                     /* of the current step */
    union { hccl_offer offer; hccl_answer answer; } small;
} hccl_op;
short    hccl_op_events(const hccl_op *op);             /* what it waits for */
aclError hccl_op_step(hccl_op *op);                     /* as far as it goes without waiting. An error with `finished` set
                                                         * has left the channel whole                                    */
void     hccl_op_stop(hccl_op *op);                     /* gives the channel back; breaks it if it was left in the middle */
