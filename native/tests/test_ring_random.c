/* Random programs of random priorities, faults and cancellations on a device with a thread of its own. For each program: it
 * completes once, in turn, with what really happened, and nothing of it lands afterwards.                                  */
#include "ring_kit.h"
#include <semaphore.h>

enum { PROGRAMS = 400, ROUNDS = 12 };

typedef struct random_state { uint64_t value; } random_state;
static uint64_t below(random_state *s, uint64_t n)          /* splitmix64 */
{
    uint64_t z = s->value += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % n;
}

typedef struct round {
    ring *r;
    random_state random, device_random, canceller_random;
    script scripts[PROGRAMS + 1];
    fake_event events[PROGRAMS + 1];
    uint64_t bytes[PROGRAMS + 1];                           /* asked for */
    int priority[PROGRAMS + 1];
    int completed[PROGRAMS + 1];
    uint64_t landed[PROGRAMS + 1];                          /* when it completed */
    sem_t submitted;                                        /* to the canceller: one more program */
    bool over;                                              /* under the fake's lock */
    int states[5];
} round;

/* ---- the threads beside the submitting one ---- */

static void *be_the_device(void *arg)                       /* a few pieces at a time */
{
    round *n = arg;
    pthread_mutex_lock(&fake.lock);
    while (!n->over) {
        if (fake.head == fake.tail)
            pthread_cond_wait(&fake.changed, &fake.lock);
        fake.let = 1 + below(&n->device_random, 8);
        fake_run();
        fake.let = 0;
        pthread_mutex_unlock(&fake.lock);                   /* the others may look */
        pthread_mutex_lock(&fake.lock);
    }
    pthread_mutex_unlock(&fake.lock);
    return NULL;
}

static void *cancel_some(void *arg)                         /* among the last few, now and then */
{
    round *n = arg;
    for (uint64_t id = 1; id <= PROGRAMS; id++) {
        while (sem_wait(&n->submitted)) { }
        if (below(&n->canceller_random, 4) == 0)
            ring_cancel(n->r, id - below(&n->canceller_random, id < 4 ? id : 4));
    }
    return NULL;
}

/* ---- the submitting one ---- */

static void write_script(round *n, uint64_t id)
{
    static const int ops[] = { RING_COPY, RING_COPY, RING_GET, RING_PUT };
    script *s = &n->scripts[id];
    uint64_t steps = below(&n->random, 5);
    for (uint64_t i = 0; i < steps; i++) {
        uint32_t ranges = (uint32_t)below(&n->random, 20);
        uint64_t bytes = 1 + below(&n->random, 50);
        int kind = below(&n->random, 4) ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_HOST_TO_HOST;
        if (below(&n->random, 6) == 0) {
            script_event(s, below(&n->random, 2) ? RING_WAIT : RING_RECORD, &n->events[id]);
            continue;
        }
        script_move(s, ops[below(&n->random, 4)], kind, id, ranges, bytes);
        n->bytes[id] += ranges * bytes;
    }
}

static void check_completion(round *n, const ring_completion *done)
{
    uint64_t id = done->id, landed, taken;
    FAKE_DO((landed = fake.landed[id], taken = fake.taken[id]));
    CHECK(id >= 1 && id <= PROGRAMS);
    n->completed[id]++;
    n->landed[id] = landed;
    n->states[done->state]++;
    CHECK(done->bytes <= landed);                           /* "known to have landed" is never too much */
    CHECK(landed <= n->bytes[id]);
    CHECK(done->submitted_ns <= done->started_ns && done->started_ns <= done->finished_ns);
    CHECK_EQ(done->ranges, taken);
    if (done->state == RING_DONE) {
        CHECK_EQ(done->bytes, n->bytes[id]);
        CHECK_EQ(landed, n->bytes[id]);
        CHECK_EQ(done->step, n->scripts[id].count);
    }
    if (done->state == RING_CANCELLED)
        CHECK_EQ(done->bytes, landed);
    CHECK(done->state == RING_DONE || done->state == RING_CANCELLED || done->state == RING_FAILED);
}

static void reap(round *n)
{
    ring_completion done[3];
    for (uint32_t got = 3; got == 3; )
        for (uint32_t i = got = ring_reap(n->r, done, 3); i > 0; i--)
            check_completion(n, &done[got - i]);
}

static void wait_for_some(round *n)
{
    struct pollfd fd = { .fd = ring_fd(n->r), .events = POLLIN };
    CHECK_EQ(poll(&fd, 1, PATIENCE_MS), 1);
    reap(n);
}

static void submit_one(round *n, uint64_t id)
{
    ring_completion ran;
    n->priority[id] = (int)below(&n->random, RING_PRIORITIES);
    write_script(n, id);
    for (;;) {
        int status = ring_submit_as(n->r, n->priority[id], id, n->scripts[id].steps, n->scripts[id].count, PATIENCE_MS, &ran);
        if (status == RING_RAN)
            check_completion(n, &ran);
        if (status != RING_FULL) {
            CHECK(status == RING_RAN || status == RING_QUEUED);
            sem_post(&n->submitted);
            return;
        }
        wait_for_some(n);
    }
}

static void inject(round *n)                                /* a call, or a piece of work, that will fail soon */
{
    static const int calls[] = { COPY_ASYNC, GET, PUT, RECORD, QUERY, WAIT_EVENT, SYNC_EVENT, SYNC_STREAM };
    uint64_t soon = 1 + below(&n->random, 10);
    int call = calls[below(&n->random, sizeof calls / sizeof *calls)];
    if (below(&n->random, 3))
        FAKE_DO((fake.fail_at[call] = fake.calls[call] + soon, fake.fail_code[call] = ACL_ERROR_RT_DRV_INTERNAL_ERROR));
    else
        FAKE_DO(fake.bad_copy = fake.copies + soon);
}

static void check_order(const round *n)                     /* of those of one priority */
{
    uint64_t last[RING_PRIORITIES] = { 0 }, disorder = 0;
    CHECK(fake.logged < FAKE_LOG);
    for (uint64_t i = 0; i < fake.logged; i++)
        if (fake.log[i].call != RECORD && fake.log[i].call != WAIT_EVENT) {
            uint64_t id = fake.log[i].remote >> 32;
            disorder += id < last[n->priority[id]];
            last[n->priority[id]] = id;
        }
    CHECK_EQ(disorder, 0);
}

static void play(uint64_t seed)
{
    static const uint64_t inline_bytes[] = { 0, 100, 1000000 };
    round *n = calloc(1, sizeof *n);
    pthread_t device, canceller;
    n->random.value = seed;
    n->device_random.value = seed << 32;
    n->canceller_random.value = ~seed;
    sem_init(&n->submitted, 0, 0);
    fake_reset();
    fake_hold();
    ring_options options = { .inline_bytes = inline_bytes[seed % 3], .grace_ms = PATIENCE_MS, .abort_ms = PATIENCE_MS };
    options.depth = 1 + (uint32_t)below(&n->random, 16);
    options.window_bytes = 30 + below(&n->random, 500);
    options.background_bytes = options.window_bytes / 4;
    options.inline_us = seed % 5 ? 1000 : 0;
    n->r = open_ring_with(options);
    pthread_create(&device, NULL, be_the_device, n);
    pthread_create(&canceller, NULL, cancel_some, n);
    bool faults = seed % 4 >= 2, abandon = seed % 2;        /* abandon: close with work under way */
    for (uint64_t id = 1; id <= PROGRAMS; id++) {
        if (faults && below(&n->random, 8) == 0)
            inject(n);
        submit_one(n, id);
        if (below(&n->random, 4) == 0)
            reap(n);
    }
    for (uint64_t id = 1; id <= PROGRAMS && !abandon; id++)
        while (!n->completed[id])
            wait_for_some(n);
    CHECK_EQ(ring_close(n->r, PATIENCE_MS), 0);
    reap(n);
    CHECK(!is_readable(n->r));
    FAKE_DO(n->over = true);
    pthread_join(device, NULL);
    pthread_join(canceller, NULL);
    ring_free(n->r);
    for (uint64_t id = 1; id <= PROGRAMS; id++) {
        CHECK_EQ(n->completed[id], 1);
        CHECK_EQ(fake.landed[id], n->landed[id]);           /* quiet since */
    }
    check_order(n);
    CHECK_EQ(fake.live_streams + fake.live_events + fake.strays + fake_waiting(), 0);
    printf("seed %d: %d done, %d failed, %d cancelled\n", (int)seed, n->states[RING_DONE], n->states[RING_FAILED], n->states[RING_CANCELLED]);
    sem_destroy(&n->submitted);
    free(n);
}

TEST(test_each_of_many_random_programs_completes_once_in_turn_and_truthfully)
{
    for (uint64_t seed = 1; seed <= ROUNDS && !check_failures; seed++)
        play(seed);
}

int main(void)
{
    RUN(test_each_of_many_random_programs_completes_once_in_turn_and_truthfully);
    return check_done();
}
