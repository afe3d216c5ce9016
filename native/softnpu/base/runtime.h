/* runtime.h: declarations that the files of the aclrt half share among themselves. soft.h declares what the HCCL half may use.
 *
 *   error, time, thread, handle, fault, hold, counters, settings, lifetime    tools that know nothing of devices
 *   current                                 the table of devices, and the context that a thread has chosen
 *   sorted, arena, map, backing             addresses, and the memory behind them
 *   share, shared_fetch, shared_event       descriptors and events for other processes
 *   memory, host, physical, vmm, pointer_kind    aclrtMalloc and relatives; ordinary memory the device may use
 *   import, ipc, vmm_share                  memory of other processes
 *   stream_find, capture                    a caller's stream; streams whose tasks become part of a graph
 *   queue, stream_wait, task                FIFO execution
 *   fence, event, event_host, ipc_event, notify, reporter, callback, host_func    waiting for one another
 *   bytes, copiers, copy, batch, fill       tasks that touch memory
 *   stream, context, primary, device        the stream calls; owners of streams
 *   init                                    aclInit to aclFinalize, versions
 *
 * Each line uses the ones above it. Locks, in the order they are taken besides what soft.h says: a device's set_lock
 * before its lock; an event's, a notify's or a reservation's and then the physical memory's before share.c's. */
#pragma once
#include "soft.h"

/* Leaves the calling function with the code of `call` unless that is 0. */
#define SOFT_TRY(call) do { aclError code_ = (call); if (code_) return code_; } while (0)

/* Vendor codes that acl.h does not declare because nothing outside softnpu compares with them. */
#define SOFT_HOST_REGISTERED     507910
#define SOFT_HOST_NOT_REGISTERED 507911

/* ---- error.c ---- */
aclError soft_null(const char *name);                       /* "NAME is NULL" */
aclError soft_bad_handle(const char *what, const void *handle);
enum { SOFT_TEXT = 256 };
char    *soft_error_divert(char *text);                     /* SOFT_TEXT bytes that get what this thread reports from now on; NULL:
                                                               the thread itself. Returns the one before */

/* ---- fault.c: bits of soft_gate. 0 is the ordinary case, so that every call pays one relaxed load. ---- */
enum { SOFT_GATE_FAULTS = 1, SOFT_GATE_FORKED = 2 };
extern atomic_int soft_gate;

/* ---- counters.c ---- */
typedef struct soft_counts {
    _Atomic uint64_t device_bytes, pinned_bytes, allocations, adopted, imported, threads, tasks_inline, tasks_queued, bytes_copied,
        sync_timeouts, races;
} soft_counts;
extern soft_counts soft_count;
aclError soft_count_timeout(aclError code);                 /* of a synchronize; returns it */
#define SOFT_COUNT(what, n) atomic_fetch_add_explicit(&soft_count.what, (uint64_t)(n), memory_order_relaxed)

/* ---- settings.c: what the environment says, read by the first aclInit ---- */
enum { SOFT_MAX_DEVICES = 64 };
/* The hardware that softnpu imitates where the vendor's differs from link to link: NO accepts whatever makes sense, HCCS is
 * two cards of one A2 server, ROCE two servers, AICPU two cards of one A3 super pod. softnpu.h describes the differences. */
typedef enum { SOFT_STRICT_NO, SOFT_STRICT_HCCS, SOFT_STRICT_ROCE, SOFT_STRICT_AICPU } soft_strictness;
typedef struct soft_settings {
    soft_strictness strict;
    int devices;
    uint32_t max_streams;                                   /* of one device, default streams included */
    uint64_t inline_bytes;                                  /* work up to this size may run in the submitting thread */
    int copiers;                                            /* threads that share a large copy */
    _Atomic uint64_t device_memory;                         /* bytes of one device */
} soft_settings;
extern soft_settings soft_setting;
aclError soft_settings_read(void);

/* ---- sorted.c: an array of ranges sorted by address, for O(log n) lookup. Locked by its owner. ---- */
typedef struct soft_entry { uintptr_t base; uint64_t size; void *value; } soft_entry;
typedef struct soft_sorted { soft_entry *entries; size_t count, room; } soft_sorted;
size_t soft_sorted_after(const soft_sorted *sorted, uintptr_t addr);      /* index of the first entry that starts above addr */
bool   soft_sorted_insert(soft_sorted *sorted, soft_entry entry);         /* false: no memory */
void   soft_sorted_remove(soft_sorted *sorted, size_t index);

/* ---- arena.c: the address range that all device pointers come from ---- */
#define SOFT_PAGE      65536ull                             /* a multiple of every page size that Linux uses with 48-bit addresses */
#define SOFT_HUGE_PAGE (2ull << 20)
aclError soft_arena_take(uint64_t size, uint64_t align, void **addr);     /* inaccessible addresses, a gap behind them */
void     soft_arena_give(void *addr);                                     /* unmaps whatever is there */
void     soft_arena_close(void *addr, uint64_t size);                     /* unmaps, keeps the addresses taken */
bool     soft_arena_has(const void *addr);
uint64_t soft_round_up(uint64_t value, uint64_t step);
uint64_t soft_page_size(void);                              /* the kernel's */

/* ---- map.c: every range that means something to the device ---- */
typedef enum { SOFT_MALLOC, SOFT_MALLOC_HOST, SOFT_ADOPTED, SOFT_REGISTERED, SOFT_IMPORTED, SOFT_MAPPED } soft_origin;
typedef struct soft_range {
    soft_span span;
    soft_origin origin;
    bool hidden;                                            /* known, but to copies like any other memory */
    uint64_t refs;                                          /* of an adopted range */
    void *address; uint64_t address_size;                   /* what the origin needs to undo it */
    void *object;
} soft_range;
typedef enum { SOFT_UNKNOWN, SOFT_INSIDE, SOFT_OUTSIDE } soft_where;      /* no known range; inside one; crosses the edge of one */
aclError    soft_map_add(const soft_range *range);          /* 107000 when it overlaps a known one */
bool        soft_map_take(const void *base, soft_origin origin, soft_range *out);   /* finds by exact start and removes */
bool        soft_map_find(const void *addr, soft_range *out);             /* the range that holds addr */
soft_where  soft_map_where(const void *addr, uint64_t size, soft_span *span);
bool        soft_map_is_ordinary(const void *addr);         /* with SOFTNPU_STRICT: adopted HOST memory, which no call pinned */
aclError    soft_map_retain(const soft_range *range);       /* adds an adopted range, or counts one more reference to it */
aclError    soft_map_release(const void *base, uint64_t size);

/* ---- backing.c: memory that another process can map ---- */
aclError soft_backing_new(uint64_t size, int *fd);          /* a memfd that can never shrink or grow */
aclError soft_backing_map_as(int fd, uint64_t offset, uint64_t size, void *at, bool writable, void **addr); /* or for reading only */
aclError soft_backing_map(int fd, uint64_t offset, uint64_t size, void *at, void **addr);  /* at NULL: anywhere in ordinary addresses */
aclError soft_backing_check(int fd, uint64_t offset, uint64_t size);      /* may a peer's fd be mapped safely? */
uint64_t soft_backing_align(uint64_t size);                 /* huge pages when it is worth it */

/* ---- lifetime.c ---- */
void soft_initialized_set(bool yes);                        /* by aclInit and the last aclFinalize */

/* ---- current.c: the imitated devices, and the context of a thread. What they do with streams is execution's. ---- */
typedef struct soft_context soft_context;
typedef struct soft_device {
    int id;
    pthread_mutex_t set_lock;                               /* refs and primary; taken before lock */
    uint64_t refs;                                          /* aclrtSetDevice calls not yet taken back */
    soft_context *primary;
    pthread_mutex_t lock;                                   /* what follows */
    soft_context *contexts;                                 /* linked by next_in_device */
    soft_stream *streams;                                   /* of every context; linked by next_in_device */
    uint32_t nstreams;
    uint64_t peers;                                         /* bit n: access to device n was enabled */
    _Atomic uint64_t used;                                  /* bytes allocated */
    _Atomic uint32_t notifies;
} soft_device;
soft_device *soft_device_of(int id);                        /* NULL when there is no such device */
aclError     soft_device_current(soft_device **device);     /* of this thread, or 107002 */
aclError     soft_device_check(int64_t id);                 /* 107001 */
aclError     soft_device_reserve(int id, uint64_t bytes);   /* accounting; 207001 when the limit is passed */
void         soft_device_unreserve(int id, uint64_t bytes);
void         soft_devices_init(void);
struct soft_context {
    soft_object object;
    aclrtContext handle;
    soft_device *device;
    soft_context *next_in_device;
    bool primary;
    atomic_bool closing;                                    /* written under the device's lock */
    atomic_bool stop_on_failure;                            /* the failure mode spreads to all streams of a context */
    atomic_uint captures;                                   /* global ones, of its streams, under way */
    aclrtStream default_stream;                             /* its handle */
};
aclError     soft_context_current(soft_context **out);      /* a reference, or 107002 */
aclError     soft_context_need(void);                       /* 0, or 107002 */
aclrtContext soft_context_handle(void);                     /* of this thread, unchecked */
void         soft_context_bind(aclrtContext handle);        /* make it this thread's */

/* ---- queue.c: order, and running ---- */
typedef struct soft_reporter soft_reporter;
struct soft_stream {
    soft_object object;
    aclrtStream handle;
    int32_t id;
    soft_context *context;                                  /* a reference */
    soft_stream *next_in_device;                            /* under the device's lock */
    soft_reporter *reporter;                                /* under reporter.c's lock: the thread subscribed to it */

    pthread_mutex_t lock;                                   /* everything below */
    pthread_cond_t work;                                    /* to the worker: a task to run, or closing */
    pthread_cond_t progress;                                /* to waiters: a task ended, an abort */
    soft_task *head, **tail;
    uint64_t submitted, finished;                           /* tasks so far; a dropped one has finished, too */
    uint64_t dropping;                                      /* taken off the queue, not yet dropped */
    bool running;                                           /* a task runs, on the worker or in a submitting thread */
    bool closing, has_worker;
    pthread_t worker;
    uint64_t aborts;                                        /* that ended something */
    aclError abort_code;
    atomic_bool abort_running;                              /* the running task shall stop; cleared when it has */
    int abort_fd;                                           /* readable while abort_running; made at the first poll */
    struct soft_capture *capture;                           /* it is captured: a reference. What is submitted goes there */
    bool mode_set, stopped;
    aclError failure;                                       /* the first one not yet reported */
    char failure_text[SOFT_TEXT + 64];
};
aclError soft_submit_wait(soft_stream *stream, soft_task *task);          /* as soft_submit, and returns after the task ended */
aclError soft_task_run(soft_task *task);                    /* with its fault, in whichever stream it says */
soft_stream *soft_queue_inside(void);                       /* the stream whose task this thread is running, or NULL */
soft_task *soft_queue_detach(soft_stream *stream);          /* locked; takes all off the queue, for: */
void     soft_queue_drop(soft_stream *stream, soft_task *list);           /* not locked */

/* ---- stream_wait.c: waiting for it, asking, ending it ---- */
void     soft_queue_init(soft_stream *stream);
void     soft_queue_destroy(soft_stream *stream);           /* after soft_queue_close */
aclError soft_queue_close(soft_stream *stream, bool force); /* refuse new work, let the queued end (force: abort it), end the worker */
void     soft_queue_abort(soft_stream *stream, aclError code);
aclError soft_queue_wait(soft_stream *stream, const struct timespec *deadline); /* all submitted so far; 507046, 107023, or a failure */
aclError soft_queue_query(soft_stream *stream, aclrtStreamStatus *status);
aclError soft_queue_await(soft_stream *stream, uint64_t number, uint64_t aborts, const struct timespec *deadline); /* locked */
aclError soft_queue_aborted(const soft_stream *stream);     /* the error of those who waited */
aclError soft_queue_refuse_inside(const soft_stream *stream);             /* a task cannot wait for its own stream */
aclError soft_queue_outside(void);                          /* nor may it end a context, a device or the runtime */

/* ---- capture.c ---- */
typedef struct soft_capture soft_capture;
void     soft_capture_take(soft_capture *capture, soft_task *task);       /* becomes part of the graph */
soft_capture *soft_capture_of(soft_stream *stream);         /* a reference, or NULL: it is not captured */
bool     soft_capture_is_active(soft_capture *capture);     /* or NULL */
aclError soft_capture_join(soft_capture *capture, soft_stream *stream);   /* by a wait for an event recorded in the capture */
aclError soft_capture_refuse_stream(soft_stream *stream);   /* 107027, if it is captured: it cannot be waited for, or asked */

/* ---- bytes.c ---- */
void soft_fill(soft_task *task, void *dst, int value, uint64_t bytes);    /* memset in pieces; stops when aborted */

/* ---- pointer_kind.c: what kind of memory a pointer is ---- */
typedef enum { SOFT_PAGEABLE, SOFT_PINNED, SOFT_DEVICE } soft_place;
typedef struct soft_spot { soft_place place; int device; } soft_spot;
aclError soft_place_of(const char *name, const void *addr, uint64_t bytes, soft_spot *spot); /* 107000 when it is no memory we can use */

/* ---- stream_find.c ---- */
aclError soft_stream_find(aclrtStream handle, soft_stream **out);         /* a reference, or 107002, 107003, 107017 */

/* ---- stream.c ---- */
aclError soft_stream_new(soft_context *context, soft_stream **out);       /* one reference for the caller */
aclError soft_stream_close(soft_stream *stream, bool force);              /* unlinks it; does not take over the caller's reference */
soft_stream **soft_device_streams(soft_device *device, const soft_context *only, size_t *count); /* references; caller frees */

/* ---- context.c ---- */
aclError soft_context_new(soft_device *device, bool primary, soft_context **out);
void     soft_context_close(soft_context *context, bool force);           /* ends its streams; takes over one reference */

/* ---- primary.c ---- */
void soft_devices_shutdown(void);                           /* ends every context, aborting what runs */

/* ---- fence.c: something that becomes done once. A host thread waits for it, or a task that an abort can wake. ---- */
typedef enum { SOFT_PENDING, SOFT_DONE, SOFT_LOST } soft_fence_state;     /* lost: its task was dropped, it will never be done */
typedef struct soft_shared_event soft_shared_event;
typedef struct soft_fence {
    soft_object object;
    pthread_mutex_t lock;
    atomic_int state;
    int64_t at_ns;                                          /* when it was done */
    int fd;                                                 /* readable from then on; made by the first that must wait */
    soft_shared_event *shared;                              /* of an IPC event: the truth is there, a reference */
    uint64_t number;                                        /* which record of it */
} soft_fence;
soft_fence *soft_fence_new(void);                           /* pending; NULL: no host memory */
void       soft_fence_set(soft_fence *fence, soft_fence_state state);     /* the first call decides */
soft_fence_state soft_fence_get(soft_fence *fence);
int        soft_fence_wait(soft_fence *fence, soft_task *task, int64_t timeout_ms); /* 1 no longer pending, 0 timeout, -1 aborted */

/* ---- shared_event.c: an event that several processes see: counters in a page that they all map ---- */
struct soft_shared_event { soft_object object; struct soft_event_page *page; int fd; };
aclError soft_shared_event_new(int fd, soft_shared_event **out);          /* takes the fd over; -1: a new page */
uint64_t soft_shared_event_number(soft_shared_event *event);              /* for a record about to be made */
void     soft_shared_event_record(soft_shared_event *event, uint64_t number);     /* it was made */
uint64_t soft_shared_event_latest(soft_shared_event *event);              /* 0: never recorded */
void     soft_shared_event_done(soft_shared_event *event, uint64_t number);
bool     soft_shared_event_is_done(soft_shared_event *event, uint64_t number);
void     soft_shared_event_wait(soft_shared_event *event, uint64_t number, int64_t at_most_ms); /* may return early */

/* ---- event.c ---- */
typedef struct soft_event {
    soft_object object;
    bool extended;                                          /* made by aclrtCreateEventExWithFlag */
    uint32_t flags;
    pthread_mutex_t lock;
    soft_fence *latest;                                     /* of the last record; NULL: never recorded */
    soft_shared_event *shared;                              /* of an IPC event */
    soft_capture *capture;                                  /* that its last record is part of: a reference; or NULL */
    bool imported;
    uint64_t key;                                           /* under which it was offered, or 0 */
} soft_event;
aclError soft_event_new(uint32_t flags, bool extended, bool imported, soft_shared_event *shared, aclrtEvent *handle);
soft_event *soft_event_get(aclrtEvent handle, aclError *code);            /* a reference, or NULL: 107000, 107017 */
soft_capture *soft_event_capture(soft_event *event);        /* of its last record: a reference, or NULL */
aclError soft_event_latest(soft_event *event, soft_fence **fence);        /* a reference to the fence of the latest record; NULL: none */

/* ---- reporter.c: threads that run callbacks ---- */
typedef struct soft_report {
    struct soft_report *next;
    aclrtCallback fn;
    void *data;
    soft_fence *done;                                       /* of a blocking callback: its task waits for this */
} soft_report;
bool     soft_reporter_serves(soft_stream *stream);         /* is a thread subscribed to it? */
void     soft_reporter_forget(soft_stream *stream);         /* the stream ends: so does its subscription */
void     soft_reporters_shutdown(void);
aclError soft_report_push(soft_stream *stream, soft_report *report);      /* takes it over, also when it returns an error */
soft_report *soft_report_take_back(const soft_fence *done);  /* the one that `done` belongs to, unless it is being run */
void     soft_report_free(soft_report *report);

/* ---- share.c: file descriptors for other processes of this user ---- */
typedef enum { SOFT_OFFER_MEMORY = 1, SOFT_OFFER_PHYSICAL, SOFT_OFFER_NOTIFY, SOFT_OFFER_EVENT } soft_offer_kind;
typedef struct soft_offer { uint32_t kind; int32_t placement; uint64_t offset, size; } soft_offer;
enum { SOFT_KEY_TEXT = 65, SOFT_MOST_PIDS = 1024 };
aclError soft_share_offer(const soft_offer *what, int fd, bool any_pid, uint64_t *key);  /* duplicates the fd */
aclError soft_share_allow(uint64_t key, const int32_t *pids, size_t count);
bool     soft_share_withdraw(uint64_t key);                 /* false: this process has no such offer */
void     soft_share_shutdown(void);
aclError soft_share_fetch(uint64_t key, soft_offer_kind kind, soft_offer *what, int *fd); /* from the process that offered it */
int32_t  soft_key_pid(uint64_t key);
void     soft_key_print(uint64_t key, char *text);          /* at most 25 bytes with the terminating zero */
aclError soft_key_parse(const char *text, uint64_t *key);

/* ---- ipc.c ---- */
aclError soft_key_check(const char *key, size_t len, uint64_t flags, uint64_t known); /* may a key be written here? */
aclError soft_flags_check(uint64_t flags, uint64_t known);

/* ---- physical.c ---- */
#define SOFT_GRANULARITY SOFT_HUGE_PAGE
typedef struct soft_physical {
    soft_object object;
    int fd, device, placement;
    uint64_t size;
    bool imported;
    pthread_mutex_t lock;                                   /* what follows */
    uint64_t maps;
    uint64_t key;                                           /* under which it was offered, or 0 */
} soft_physical;
aclError soft_vmm_size(size_t size);                        /* a multiple of the granularity? */
aclError soft_vmm_zero(const char *name, uint64_t value);   /* reserved arguments */
aclError soft_physical_new(soft_physical value, aclrtDrvMemHandle *handle);  /* takes over value.fd, unless it fails */
soft_physical *soft_physical_get(aclrtDrvMemHandle handle, aclError *code);  /* a reference, or NULL: 107000, 107017 */
