/* soft.h: declarations that the files of softnpu share. None is part of the vendor's ABI.
 *
 * Rules of the house
 *   - No exported function may crash on bad arguments: handles are looked up, never followed; the documented code comes back.
 *   - The function that first sees an error reports it with soft_error(); callers pass the code on unchanged.
 *   - Lock order: handle table < device < stream < event/notify; the memory map's lock is taken last and held briefly.
 *   - No lock is held while a task runs or a callback is called.                                                     */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#pragma GCC visibility push(default)
#include "acl.h"
#include "hccl.h"
#include "softnpu.h"
#pragma GCC visibility pop

/* ---- error.c: the thread's recent message and last error ---- */
aclError   soft_error(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
HcclResult soft_hccl_error(HcclResult code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- time.c ---- */
int64_t soft_now_ns(void);                                  /* monotonic */
void    soft_deadline(struct timespec *at, int64_t ms);     /* CLOCK_MONOTONIC; ms < 0 = never (tv_sec at its maximum) */
void    soft_cond_init(pthread_cond_t *cond);               /* a condition on CLOCK_MONOTONIC */

/* ---- thread.c: deaf to signals, named (at most 15 characters), counted in softnpu_counters.threads until run returns ---- */
int soft_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument); /* 0, or -1 */
void soft_thread_copies(bool much);                         /* the calling thread's last copy, if it is softnpu's */
void soft_thread_stand_back(int nice);                      /* of the calling thread: this much modesty */

/* ---- handle.c: numbers that look like pointers. A stale or foreign handle is not found, it is never followed. ---- */
typedef enum { SOFT_CONTEXT = 1, SOFT_STREAM, SOFT_EVENT, SOFT_NOTIFY, SOFT_PHYSICAL, SOFT_COMM, SOFT_REGION,
               SOFT_GRAPH } soft_kind;
typedef struct soft_object {                                /* first member of whatever a handle names */
    atomic_int refs;
    void (*destroy)(struct soft_object *);                  /* after the last reference is gone */
} soft_object;
void *soft_handle_new(soft_kind kind, soft_object *object); /* takes over one reference; NULL when the table is full */
void *soft_handle_get(soft_kind kind, const void *handle);  /* a new reference to the object, or NULL */
void *soft_handle_remove(soft_kind kind, const void *handle); /* the table's reference, or NULL */
uint64_t soft_handle_count(soft_kind kind);
void  soft_ref(soft_object *object);
void  soft_unref(soft_object *object);

/* ---- fault.c. With no fault set these cost one relaxed load. ---- */
typedef struct soft_exec_fault {
    aclError code;
    int64_t delay_ms, flip_at;
    uint64_t hold, half;                                    /* numbers of holds, or 0 */
    bool hang, drop, flip;
} soft_exec_fault;
int  soft_fault(const char *function, soft_exec_fault *exec); /* the code to return at once, or 0; exec may be NULL (then a delay is taken here) */
int  soft_fault_init(void);                                  /* reads SOFTNPU_FAULTS; an ACL error code when that is no spec */

/* ---- hold.c ---- */
enum { SOFT_HOLD_NAME = 32 };
bool     soft_hold_is_name(const char *text, size_t length);
uint64_t soft_hold_number(const char *name);                /* made if there is none; 0: there are too many */
void     soft_hold_stand(uint64_t number);                  /* until it is released; returns at once if it has been, or is 0 */
void     soft_hold_open_all(void);

/* ---- map.c, host.c, import.c: every range that means something to the device ---- */
typedef struct soft_span {
    uintptr_t base; uint64_t size;                          /* the whole allocation */
    int placement;                                          /* 0 pinned host, 1 device */
    int device;
    int fd; uint64_t fd_offset;                             /* shareable backing (memfd, sealed against shrinking), or -1: private memory */
} soft_span;
bool soft_span_of(const void *addr, uint64_t size, soft_span *span);  /* does [addr, addr+size) lie inside one range? */
/* The same. `span` is what it gave a moment ago in the same check of many ranges, or zero: most are in the same allocation. */
bool soft_span_again(const void *addr, uint64_t size, soft_span *span);
int  soft_mem_adopt(void *addr, uint64_t size, int placement);
int  soft_mem_release(void *addr, uint64_t size);
int  soft_mem_import(int fd, uint64_t fd_offset, uint64_t size, int placement, bool writable, void **addr); /* maps, touches nothing; checks size and seals */
void soft_mem_unimport(void *addr);

/* ---- settings.c: does SOFTNPU_STRICT say so? ---- */
bool soft_is_strict(void);                                  /* hccs, roce or aicpu */
bool soft_is_hccs(void);                                    /* hccs or aicpu: the link kind is HCCS */

/* ---- lifetime.c, current.c ---- */
bool soft_initialized(void);                                /* aclInit has run */
int  soft_device_count(void);
int  soft_current_device(void);                             /* of this thread, or -1 */

/* ---- queue.c, task.c, stream_find.c, bytes.c: FIFO executors. queue.c tells what an abort promises. ---- */
typedef struct soft_stream soft_stream;
typedef struct soft_task {
    struct soft_task *next;
    const char *function;                                   /* the exported function that made it */
    aclError (*run)(struct soft_task *);                    /* on the worker; or, small work on an idle stream, in the submitting thread */
    void (*drop)(struct soft_task *);                       /* frees it: called once, after run or instead of it */
    soft_stream *stream;                                    /* set by soft_submit */
    uint64_t moved;                                         /* bytes of it that bytes.c has moved or is moving */
    uint64_t bytes;                                         /* the work in it; SOFT_MAY_BLOCK = never run in the submitting thread */
    soft_exec_fault fault;                                  /* as soft_fault() left it; applied around run by the stream */
} soft_task;
#define SOFT_MAY_BLOCK UINT64_MAX
soft_stream *soft_stream_get(aclrtStream handle);           /* NULL handle = the current context's default stream; a reference, or NULL */
void         soft_stream_put(soft_stream *stream);
aclError     soft_submit(soft_stream *stream, soft_task *task); /* takes the task over, also when it returns an error */
aclError     soft_capture_refuses(void);                    /* a synchronous call in this thread, while a graph is captured: 107030 */
bool         soft_task_aborted(const soft_task *task);      /* long tasks ask this between pieces of at most 1 MiB */
int          soft_task_poll(soft_task *task, int fd, short events, int timeout_ms); /* 1 ready, 0 timeout, -1 aborted */
void         soft_task_half(const soft_task *task, uint64_t end); /* called before its bytes up to `end` move: stands in the fault `half` */
/* memcpy in pieces; counts; stops when aborted. `next`: what the task will read after it, or NULL */
void         soft_copy(soft_task *task, void *dst, const void *src, uint64_t bytes, const void *next);

