/* io.c: the threads of the process that serve all connections. They start with the first one and end with the last one. */
#include "net_internal.h"

#include <errno.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

int64_t ring_now_ns(void);
void ring_signal(int fd);

enum { MOST_THREADS = 16, EVENTS = 64 };
struct io_thread {
    pthread_t thread;
    int epoll, wake;
    uint32_t users;                       /* connections; the engine's lock guards this and what follows */
    connection *first;                    /* whose channels' time limits it keeps: those with index 0 */
    uint64_t turns;
    bool ends;
    _Atomic int64_t wakes_ns;             /* when it looks at time limits again */
    char scratch[SCRATCH];
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t turned;
    _Atomic pid_t pid;                    /* read before the lock is taken, which a fork may have left taken */
    uint32_t count, users;
    bool is_ending;                       /* its threads are being joined */
    io_thread threads[MOST_THREADS];
} engine = {.lock = PTHREAD_MUTEX_INITIALIZER, .turned = PTHREAD_COND_INITIALIZER};

/* ---- a thread ---- */

static void serve(io_thread *t, const struct epoll_event *event)
{
    connection *k = event->data.ptr;
    net_reason why;
    uint64_t count;
    if (!k)
        (void)!read(t->wake, &count, sizeof count);
    else if (!connection_serve(k, event->events, t->scratch, &why))
        channel_break(k->channel, &why);
}

/* io_leave() waits for the end of this turn, so no channel goes away in the middle of it. */
static int look(io_thread *t)
{
    net_channel *due[EVENTS];
    uint32_t n = 0;
    int64_t next = INT64_MAX, now = ring_now_ns();
    atomic_store(&t->wakes_ns, INT64_MIN);        /* before the channels are read: who sets an earlier time now has it read */
    pthread_mutex_lock(&engine.lock);
    for (connection *k = t->first; k; k = k->next_of_io)
        if (atomic_load(&k->channel->due_ns) <= now && n < EVENTS)
            due[n++] = k->channel;
    pthread_mutex_unlock(&engine.lock);
    for (uint32_t i = 0; i < n; i++)
        channel_look(due[i]);
    pthread_mutex_lock(&engine.lock);
    for (connection *k = t->first; k; k = k->next_of_io) {
        int64_t ns = atomic_load(&k->channel->due_ns);
        next = ns < next ? ns : next;
    }
    atomic_store(&t->wakes_ns, next);
    for (connection *k = t->first; k; k = k->next_of_io) {
        int64_t ns = atomic_load(&k->channel->due_ns);
        next = ns < next ? ns : next;
    }
    pthread_mutex_unlock(&engine.lock);
    now = ring_now_ns();
    int64_t ms = next == INT64_MAX ? -1 : next <= now ? 0 : (next - now) / 1000000 + 1;
    return ms > INT32_MAX ? INT32_MAX : (int)ms;
}

static void *work(void *arg)
{
    io_thread *t = arg;
    struct epoll_event events[EVENTS];
    prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0);
    for (bool ends = false; !ends;) {
        int n = epoll_wait(t->epoll, events, EVENTS, look(t));
        for (int i = 0; i < n; i++)
            serve(t, &events[i]);
        pthread_mutex_lock(&engine.lock);
        t->turns++;
        ends = t->ends;
        pthread_cond_broadcast(&engine.turned);
        pthread_mutex_unlock(&engine.lock);
    }
    return NULL;
}

/* ---- the engine; its lock is held ---- */

static int start(io_thread *t)
{
    struct epoll_event wake = {.events = EPOLLIN};
    sigset_t all, before;
    t->epoll = epoll_create1(EPOLL_CLOEXEC);
    t->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->first = NULL;
    t->users = 0;
    t->ends = false;
    t->wakes_ns = INT64_MIN;
    int code = t->epoll < 0 || t->wake < 0 || epoll_ctl(t->epoll, EPOLL_CTL_ADD, t->wake, &wake) ? errno : 0;
    if (!code) {
        sigfillset(&all);                 /* signals are for the threads of the application */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        code = pthread_create(&t->thread, NULL, work, t);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (code) {
        if (t->epoll >= 0)
            close(t->epoll);
        if (t->wake >= 0)
            close(t->wake);
        return -code;
    }
    pthread_setname_np(t->thread, "aiodatadist-net");
    return 0;
}

/* In a forked child the parent's threads do not exist, and its descriptors are of no use. */
static void forget_parent(void)
{
    if (engine.pid == getpid())
        return;
    engine.pid = getpid();
    engine.count = engine.users = 0;
    engine.is_ending = false;
}

/* A thread of the parent may have held the lock, and others may have waited. */
static void forget_locks(void)
{
    pthread_mutex_init(&engine.lock, NULL);
    pthread_cond_init(&engine.turned, NULL);
}

int io_join(connection *k, uint32_t threads)
{
    int code = 0;
    if (engine.pid && engine.pid != getpid())
        forget_locks();
    pthread_mutex_lock(&engine.lock);
    forget_parent();
    while (engine.is_ending)
        pthread_cond_wait(&engine.turned, &engine.lock);
    if (engine.users == 0)
        while (!code && engine.count < threads)
            code = start(&engine.threads[engine.count++]);
    engine.count -= code != 0;
    code = engine.count ? 0 : code;       /* fewer threads are slower, not wrong */
    if (!code) {
        io_thread *t = engine.threads;
        for (uint32_t i = 1; i < engine.count; i++)
            t = engine.threads[i].users < t->users ? &engine.threads[i] : t;
        k->io = t;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = k};
        code = epoll_ctl(t->epoll, EPOLL_CTL_ADD, k->fd, &event) ? -errno : 0;
        t->users += !code;
        engine.users += !code;
        if (!code && k->index == 0) {
            k->next_of_io = t->first;
            t->first = k;
        }
    }
    pthread_mutex_unlock(&engine.lock);
    return code;
}

static void unlist(connection *k)
{
    connection **at = &k->io->first;
    while (*at && *at != k)
        at = &(*at)->next_of_io;
    if (*at)
        *at = k->next_of_io;
}

void io_leave(net_channel *c)
{
    pthread_mutex_lock(&engine.lock);
    for (uint32_t i = 0; i < c->connections_count; i++)
        unlist(c->connections[i]);
    for (uint32_t i = 0; c->connections_count && i < engine.count; i++) {
        io_thread *t = &engine.threads[i];
        uint64_t before = t->turns;
        ring_signal(t->wake);
        while (t->turns == before)
            pthread_cond_wait(&engine.turned, &engine.lock);
    }
    for (uint32_t i = 0; i < c->connections_count; i++)
        c->connections[i]->io->users--;
    engine.users -= c->connections_count;         /* only now: who leaves last ends the threads that others wait for */
    if (c->connections_count && !engine.users && engine.count && !engine.is_ending) {
        for (uint32_t i = 0; i < engine.count; i++) {
            engine.threads[i].ends = true;
            ring_signal(engine.threads[i].wake);
        }
        uint32_t count = engine.count;
        engine.is_ending = true;
        for (uint32_t i = 0; i < count; i++) {
            pthread_mutex_unlock(&engine.lock);
            pthread_join(engine.threads[i].thread, NULL);
            pthread_mutex_lock(&engine.lock);
            close(engine.threads[i].epoll);
            close(engine.threads[i].wake);
        }
        engine.count = 0;
        engine.is_ending = false;
        pthread_cond_broadcast(&engine.turned);
    }
    pthread_mutex_unlock(&engine.lock);
}

void io_interest(connection *k, bool out)
{
    struct epoll_event event = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.ptr = k};
    epoll_ctl(k->io->epoll, EPOLL_CTL_MOD, k->fd, &event);
}

void io_drop(connection *k)
{
    epoll_ctl(k->io->epoll, EPOLL_CTL_DEL, k->fd, NULL);
}

void io_look_at_all(void)
{
    if (!engine.pid || engine.pid != getpid())
        return;
    pthread_mutex_lock(&engine.lock);
    for (io_thread *t = engine.threads; t < engine.threads + engine.count; t++) {
        for (connection *k = t->first; k; k = k->next_of_io)
            atomic_store(&k->channel->due_ns, 0);
        ring_signal(t->wake);
    }
    pthread_mutex_unlock(&engine.lock);
}

void io_look_at(net_channel *c)
{
    if (!c->connections_count)
        return;
    io_thread *t = c->connections[0]->io;
    if (atomic_load(&c->due_ns) < atomic_load(&t->wakes_ns))
        ring_signal(t->wake);
}
