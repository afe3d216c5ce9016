/* care.c: the thread of care.h, and populating at once.
 *
 * A page's first use costs 1 to 5 us, and a peer's that exists 0.3: ten to fifty times what copying it does. Private memory on pages
 * of 4 KiB is looked up and pinned page by page. So memory that is registered, mapped or opened as a pool is looked after behind
 * the call, in slices. Between two slices the thread naps for as long as one took, and for much longer if streams had work in the
 * meantime. Slices are short, because the kernel keeps the process's table of mappings locked during one.
 *
 * Pages that exist later are found in a later pass: passes are repeated, after pauses that double, until nothing is left to do.
 * The thread runs while there is something to look after, and has ended when the last soft_care_end() returns.              */
#include "care.h"
#include "runtime.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ                                  /* Linux 5.14; older C libraries do not name them */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE                                       /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

enum { MODEST = 10, IDLE_SHARE = 1, BUSY_SHARE = 15, SHORTEST_NAP_NS = 20 * 1000, LONGEST_NAP_NS = 100 * 1000 * 1000 };
#define POPULATE_SLICE  ((uint64_t)256 << 10)
#define LOOK_EVERY      ((uint64_t)32 << 20)                /* populated between two looks at what memory is left */
#define FIRST_PAUSE_NS  (250 * 1000 * 1000ll)
#define LONGEST_PAUSE_NS (64 * 1000 * 1000 * 1000ll)
#define MAPPED_MOST     ((uint64_t)16 << 30)                /* of peers' memory: page tables take a 512th of it */

typedef struct care {
    struct care *next;
    soft_care kind;
    uintptr_t base, end, at;
    bool left_out;                                          /* by this pass */
    int64_t due_ns, pause_ns;
    uint8_t done[];                                         /* bits, one for each slice of 2 MiB */
} care;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news, stood;                          /* for the thread; it is done with a slice */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static care *list, *in_hand;
static uint64_t mapped;
static bool has_thread;
static uint64_t generation;                                 /* of the thread: an older one ends */
static pthread_t thread;
static pid_t owner;

static void init(void)
{
    soft_cond_init(&news);
    soft_cond_init(&stood);
    owner = getpid();
}

/* ---- slices ---- */

/* False: this memory gets no pages in this way. */
static bool populate(uintptr_t at, uint64_t size)
{
    return !madvise((void *)at, size, MADV_POPULATE_WRITE) || errno == EAGAIN || errno == EINTR;
}

/* How many pages from `at` on, at most those of a huge page, are there. */
static uint64_t present(uintptr_t at, uint64_t size, unsigned char *pages)
{
    uint64_t page = soft_page_size(), count = (size + page - 1) / page, there = 0;
    if (mincore((void *)at, size, pages))
        return 0;
    while (there < count && pages[there] & 1)
        there++;
    return there;
}

/* Pages that are missing must stay so: reading one of a peer's memory would make it. */
static bool map_present(uintptr_t at, uint64_t size)
{
    unsigned char pages[SOFT_HUGE_PAGE / 4096];
    uint64_t page = soft_page_size(), count = (size + page - 1) / page;
    if (present(at, size, pages) == count)
        return !madvise((void *)at, size, MADV_POPULATE_READ);
    for (uint64_t first = 0, stop; first < count; first = stop) {
        for (stop = first; stop < count && (pages[stop] & 1) == (pages[first] & 1); stop++) { }
        if (pages[first] & 1)
            madvise((void *)(at + first * page), (stop - first) * page, MADV_POPULATE_READ);
    }
    return false;
}

/* Only where all pages are there, so that no more memory is used than before. What is under MADV_NOHUGEPAGE stays as it is. */
static bool enlarge(uintptr_t at, uint64_t size)
{
    unsigned char pages[SOFT_HUGE_PAGE / 4096];
    if (at % SOFT_HUGE_PAGE || size < SOFT_HUGE_PAGE)
        return true;
    if (present(at, size, pages) < SOFT_HUGE_PAGE / soft_page_size())
        return false;
    return !madvise((void *)at, size, MADV_COLLAPSE) || errno == EINVAL;
}

static uint64_t slice_of(const care *job)
{
    uint64_t left = job->end - job->at, most = job->kind == SOFT_POPULATE ? POPULATE_SLICE : SOFT_HUGE_PAGE - job->at % SOFT_HUGE_PAGE;
    return left < most ? left : most;
}

static uint8_t bit_of(uint64_t slice)
{
    return (uint8_t)(1u << slice % 8);
}

/* Without the lock; the job is in hand. False: there is no room, and this pass is over. */
static bool do_slice(care *job)
{
    uint64_t size = slice_of(job), number = job->at / SOFT_HUGE_PAGE - job->base / SOFT_HUGE_PAGE;
    if (job->kind == SOFT_POPULATE) {
        if ((job->at - job->base) % LOOK_EVERY == 0 && soft_headroom() < LOOK_EVERY)
            return false;
        job->at = populate(job->at, size) ? job->at + size : job->end;
        return true;
    }
    if (!(job->done[number / 8] & bit_of(number))) {
        bool done = job->kind == SOFT_MAP ? map_present(job->at, size) : enlarge(job->at, size);
        job->done[number / 8] |= done ? bit_of(number) : 0;
        job->left_out |= !done;
    }
    job->at += size;
    return true;
}

/* ---- the thread ---- */

static care *first_due(void)                                /* locked; NULL: there is none */
{
    care *first = NULL;
    for (care *at = list; at; at = at->next)
        if (!first || at->due_ns < first->due_ns)
            first = at;
    return first;
}

static void forget(care *job)                               /* locked */
{
    care **at = &list;
    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    mapped -= job->kind == SOFT_MAP ? job->end - job->base : 0;
    free(job);
}

/* Locked. The next pass takes up what this one left out. */
static void begin_pass(care *job)
{
    job->at = job->kind == SOFT_POPULATE ? job->at : job->base;
    job->left_out = false;
    job->due_ns = soft_now_ns() + job->pause_ns;
    job->pause_ns = 2 * job->pause_ns < LONGEST_PAUSE_NS ? 2 * job->pause_ns : LONGEST_PAUSE_NS;
}

static void end_slice(care *job, bool had_room)             /* locked */
{
    if (!had_room || (job->at == job->end && job->left_out))
        begin_pass(job);
    else if (job->at == job->end)
        forget(job);
}

static uint64_t work_of_streams(void)
{
    return atomic_load(&soft_count.tasks_inline) + atomic_load(&soft_count.tasks_queued);
}

static void wait_until(int64_t ns)                          /* locked; or for news */
{
    struct timespec until = { ns / 1000000000, ns % 1000000000 };
    pthread_cond_timedwait(&news, &lock, &until);
}

/* Locked, except during the slice. */
static void look_after_one(care *job)
{
    uint64_t before = work_of_streams();
    int64_t began = soft_now_ns();
    in_hand = job;
    pthread_mutex_unlock(&lock);
    bool had_room = do_slice(job);
    pthread_mutex_lock(&lock);
    int64_t now = soft_now_ns(), nap = (now - began) * (work_of_streams() == before ? IDLE_SHARE : BUSY_SHARE);
    nap = nap < SHORTEST_NAP_NS ? SHORTEST_NAP_NS : nap > LONGEST_NAP_NS ? LONGEST_NAP_NS : nap;
    in_hand = NULL;
    end_slice(job, had_room);
    pthread_cond_broadcast(&stood);
    if (list)
        wait_until(now + nap);
}

static void *look_after_all(void *argument)
{
    uint64_t mine = (uint64_t)(uintptr_t)argument;
    soft_thread_stand_back(MODEST);
    pthread_mutex_lock(&lock);
    while (mine == generation && list) {
        care *job = first_due();
        if (job->due_ns > soft_now_ns())
            wait_until(job->due_ns);
        else
            look_after_one(job);
    }
    if (mine == generation) {                               /* nothing is left to do, and no call waits for the end of this thread */
        has_thread = false;
        pthread_detach(pthread_self());
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* ---- what is looked after ---- */

static care *find(soft_care kind, uintptr_t base)           /* locked */
{
    care *at = list;
    while (at && (at->kind != kind || at->base != base))
        at = at->next;
    return at;
}

static bool start_thread(void)                              /* locked */
{
    if (!has_thread)
        has_thread = !soft_thread_start(&thread, "softnpu-pages", look_after_all, (void *)(uintptr_t)++generation);
    return has_thread;
}

static bool is_ours(void)
{
    pthread_once(&once, init);
    return getpid() == owner;
}

static care *new_care(soft_care kind, uintptr_t base, uint64_t size)
{
    uint64_t slices = (base + size - 1) / SOFT_HUGE_PAGE - base / SOFT_HUGE_PAGE + 1;
    care *job = calloc(1, sizeof *job + (kind == SOFT_POPULATE ? 0 : (slices + 7) / 8));
    if (job)
        *job = (care){ .kind = kind, .base = base, .end = base + size, .at = base, .pause_ns = FIRST_PAUSE_NS };
    return job;
}

void soft_care_begin(soft_care kind, uintptr_t base, uint64_t size)
{
    uintptr_t start = base / soft_page_size() * soft_page_size();
    if (!size || !is_ours())
        return;
    pthread_mutex_lock(&lock);
    bool is_wanted = !find(kind, start) && (kind != SOFT_MAP || size <= MAPPED_MOST - mapped);
    care *job = is_wanted ? new_care(kind, start, base + size - start) : NULL;
    if (job) {
        job->next = list;
        list = job;
        mapped += kind == SOFT_MAP ? job->end - job->base : 0;
        pthread_cond_signal(&news);
        if (!start_thread())
            forget(job);
    }
    pthread_mutex_unlock(&lock);
}

void soft_care_end(soft_care kind, uintptr_t base)
{
    uintptr_t start = base / soft_page_size() * soft_page_size();
    if (!is_ours())
        return;
    pthread_mutex_lock(&lock);
    care *job = find(kind, start);
    while (job && in_hand == job) {
        pthread_cond_wait(&stood, &lock);
        job = find(kind, start);                            /* it may have been the last slice */
    }
    if (job)
        forget(job);
    bool join = job && !list && has_thread;
    pthread_t last = thread;
    if (join) {
        generation++;
        has_thread = false;
        pthread_cond_broadcast(&news);
    }
    pthread_mutex_unlock(&lock);
    if (join)
        pthread_join(last, NULL);
}

/* ---- populating ---- */

static aclError check_ours(const void *addr, uint64_t size)
{
    soft_span span;
    if (addr && size && soft_span_of(addr, size, &span) && span.fd >= 0)
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%llu bytes at %p are not in one allocation of softnpu's", (unsigned long long)size, addr);
}

uint64_t softnpu_present(void *addr, uint64_t size)
{
    unsigned char pages[SOFT_HUGE_PAGE / 4096];
    uint64_t page = soft_page_size(), bytes = 0;
    uintptr_t start = (uintptr_t)addr / page * page, end = (uintptr_t)addr + size;
    for (uintptr_t at = start; at < end; at += SOFT_HUGE_PAGE) {
        uint64_t part = end - at < SOFT_HUGE_PAGE ? end - at : SOFT_HUGE_PAGE, count = (part + page - 1) / page;
        if (!mincore((void *)at, part, pages))
            for (uint64_t i = 0; i < count; i++)
                bytes += pages[i] & 1 ? page : 0;
    }
    return bytes < size ? bytes : size;
}

void softnpu_populate_soon(void *addr, uint64_t size)
{
    if (!check_ours(addr, size) && softnpu_present(addr, size) < size)
        soft_care_begin(SOFT_POPULATE, (uintptr_t)addr, size);
}

int softnpu_populate(void *addr, uint64_t size, const int32_t *stop)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(check_ours(addr, size));
    uint64_t missing = size - softnpu_present(addr, size), room = soft_headroom();
    if (missing > room)
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "%llu bytes have no pages so far, and only %llu may get some: an eighth of the "
                          "machine's memory, and of the container's limit, is left", (unsigned long long)missing, (unsigned long long)room);
    for (uintptr_t at = (uintptr_t)addr / soft_page_size() * soft_page_size(), end = (uintptr_t)addr + size; at < end; at += SOFT_HUGE_PAGE) {
        if (stop && *(volatile const int32_t *)stop)
            break;
        populate(at, end - at < SOFT_HUGE_PAGE ? end - at : SOFT_HUGE_PAGE);
    }
    return ACL_SUCCESS;
}
