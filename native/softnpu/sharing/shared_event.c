/* shared_event.c: the part of an IPC event that several processes see.
 *
 * Records are numbered. The page says which was the last one made, and up to which the event is done; waiters sleep until
 * the latter changes. They look again after a few milliseconds by themselves, for the sake of an abort that happened meanwhile.
 * If the recording process dies before its stream came to the record, the event is never done: the waiter's timeout or
 * abort ends that, as with a device that is lost.                                                                     */
#include "runtime.h"
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct soft_event_page {
    _Atomic uint64_t numbers;                               /* given out; a record that was refused used one up for nothing */
    _Atomic uint64_t recorded, done;
    _Atomic uint32_t changes;                               /* what waiters sleep on: a futex has 32 bits */
};

static void destroy(soft_object *object)
{
    soft_shared_event *event = (soft_shared_event *)object; /* its first member */
    munmap(event->page, SOFT_PAGE);
    close(event->fd);
    free(event);
}

static aclError map_page(int fd, soft_shared_event **out)
{
    soft_shared_event *event = calloc(1, sizeof *event);
    void *page;
    if (!event)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for an event");
    aclError code = soft_backing_check(fd, 0, SOFT_PAGE);
    if (code == ACL_SUCCESS)
        code = soft_backing_map(fd, 0, SOFT_PAGE, NULL, &page);
    if (code) {
        free(event);
        return code;
    }
    *event = (soft_shared_event){ { 1, destroy }, page, fd };
    *out = event;
    return ACL_SUCCESS;
}

aclError soft_shared_event_new(int fd, soft_shared_event **out)
{
    if (fd < 0)
        SOFT_TRY(soft_backing_new(SOFT_PAGE, &fd));
    aclError code = map_page(fd, out);
    if (code)
        close(fd);
    return code;
}

uint64_t soft_shared_event_number(soft_shared_event *event)
{
    return atomic_fetch_add(&event->page->numbers, 1) + 1;
}

static void raise_to(_Atomic uint64_t *counter, uint64_t number)
{
    uint64_t now = atomic_load(counter);
    while (now < number && !atomic_compare_exchange_weak(counter, &now, number)) { }
}

void soft_shared_event_record(soft_shared_event *event, uint64_t number)
{
    raise_to(&event->page->recorded, number);
}

uint64_t soft_shared_event_latest(soft_shared_event *event)
{
    return atomic_load(&event->page->recorded);
}

void soft_shared_event_done(soft_shared_event *event, uint64_t number)
{
    raise_to(&event->page->done, number);
    atomic_fetch_add(&event->page->changes, 1);
    syscall(SYS_futex, &event->page->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool soft_shared_event_is_done(soft_shared_event *event, uint64_t number)
{
    return atomic_load(&event->page->done) >= number;
}

void soft_shared_event_wait(soft_shared_event *event, uint64_t number, int64_t at_most_ms)
{
    struct timespec time = { .tv_sec = (time_t)(at_most_ms / 1000), .tv_nsec = (long)(at_most_ms % 1000 * 1000000) };
    uint32_t seen = atomic_load(&event->page->changes);
    if (!soft_shared_event_is_done(event, number))
        syscall(SYS_futex, &event->page->changes, FUTEX_WAIT, seen, &time, NULL, 0);
}
