/* Programs run in the submitting call if they are expected to be short, and are left to the worker as soon as it would wait. */
#include "ring_kit.h"

enum { MANY = 1000, WINDOW_RANGES = 192, FIRST_LOOK = 32, LONG_US = 1000000, SHORT_US = 1000, RATHER_SLOW_US = 50000 };

static ring *open_expecting(uint32_t inline_us)
{
    return open_ring_with((ring_options){ 8, 1 << 20, 1 << 20, PATIENCE_MS, 0, PATIENCE_MS, 0, 0, 0, inline_us });
}

static void get_many(script *s, uint64_t id)
{
    script_move(s, RING_GET, 0, id, MANY, 8);
}

static bool is_here(uint64_t at)
{
    return pthread_equal(fake.log[at].thread, pthread_self());
}

TEST(test_many_ranges_run_in_the_submitting_call)
{
    fake_reset();
    ring *r = open_expecting(LONG_US);
    ring_completion ran;
    script s = { 0 };
    get_many(&s, 1);
    CHECK_EQ(ring_submit(r, 1, s.steps, s.count, 1000, &ran), RING_RAN);
    CHECK_DONE(ran, 1, RING_DONE, 8 * MANY, MANY);
    CHECK_EQ(fake_calls(GET), (MANY + WINDOW_RANGES - 1) / WINDOW_RANGES);
    for (uint64_t i = 0; i < fake.logged; i++)
        CHECK(is_here(i));
    CHECK(!is_readable(r));
    close_ring(r);
}

TEST(test_many_ranges_are_not_expected_to_be_short)
{
    fake_reset();
    ring *r = open_expecting(20);                           /* a thousand ranges take 45 us at best */
    script s = { 0 };
    get_many(&s, 1);
    CHECK_EQ(submit(r, 1, &s, 1000), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 8 * MANY, MANY);
    CHECK(!is_here(0));
    close_ring(r);
}

TEST(test_worker_issues_the_rest_if_the_device_is_not_done_with_a_window)
{
    fake_reset();
    fake_hold();
    ring *r = open_expecting(LONG_US);
    script s = { 0 };
    get_many(&s, 1);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    CHECK(is_here(0));
    fake_reached(GET, 2);                                   /* two windows are under way at most, the one from here included */
    fake_reached(SYNC_EVENT, 1);
    CHECK_EQ(fake_calls(GET), 2);
    fake_let_all();
    CHECK_DONE(next_completion(r), 1, RING_DONE, 8 * MANY, MANY);
    CHECK_EQ(fake_calls(GET), (MANY + WINDOW_RANGES - 1) / WINDOW_RANGES);
    CHECK_EQ(fake.landed[1], 8 * MANY);
    ring_completion ran;
    get_many(&s, 2);
    CHECK_EQ(ring_submit(r, 2, &s.steps[1], 1, 1000, &ran), RING_RAN);      /* idle again */
    close_ring(r);
}

TEST(test_a_program_that_was_left_to_the_worker_can_be_cancelled)
{
    fake_reset();
    fake_hold();
    ring *r = open_expecting(LONG_US);
    script s = { 0 };
    get_many(&s, 1);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    fake_reached(SYNC_EVENT, 1);
    CHECK_EQ(ring_cancel(r, 1), 1);
    fake_let_all();
    ring_completion done = next_completion(r);
    CHECK_EQ(done.state, RING_CANCELLED);
    CHECK(done.ranges <= 2 * WINDOW_RANGES);
    CHECK_EQ(done.bytes, 8 * done.ranges);
    CHECK_EQ(fake.landed[1], done.bytes);                   /* and nothing lands later */
    close_ring(r);
    CHECK_EQ(fake.landed[1], done.bytes);
}

static void *let_go_late(void *unused)
{
    (void)unused;
    fake_reached(GET, 1);
    nanosleep(&(struct timespec){ .tv_nsec = RATHER_SLOW_US * 1000 }, NULL);
    fake_go();
    return NULL;
}

TEST(test_submitting_call_that_takes_longer_than_expected_leaves_the_rest)
{
    fake_reset();
    fake_stop(GET);
    ring *r = open_expecting(SHORT_US);
    script s = { 0 };
    pthread_t other;
    get_many(&s, 1);
    CHECK_EQ(pthread_create(&other, NULL, let_go_late, NULL), 0);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    pthread_join(other, NULL);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 8 * MANY, MANY);
    CHECK(is_here(0));
    CHECK(!is_here(WINDOW_RANGES));
    close_ring(r);
}

static void copy_of_untouched_pages(const HcclOneSideOpDesc *ranges, uint32_t count, uint64_t total)
{
    nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    fake_copy(ranges, count, total);
}

static aclError copy_async_of_untouched_pages(void *to, size_t room, const void *from, size_t n, aclrtMemcpyKind kind, aclrtStream s)
{
    if (!fake_calls(COPY_ASYNC))
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    return fake_copy_async(to, room, from, n, kind, s);
}

static ring *open_on_untouched_pages(uint32_t inline_us)
{
    ring *r = NULL;
    ring_driver driver = fake_driver;
    ring_options options = { 8, 1 << 20, 1 << 20, PATIENCE_MS, 0, PATIENCE_MS, 0, 0, 0, inline_us };
    driver.copy = copy_of_untouched_pages;
    driver.copy_async = copy_async_of_untouched_pages;
    CHECK_EQ(ring_open(&driver, HOME, &options, &r), 0);
    return r;
}

/* A thousand ranges of 8 bytes are within one window. */
TEST(test_submitting_call_looks_at_the_clock_within_a_window)
{
    static const int kinds[] = { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_DEVICE_TO_DEVICE };
    for (int k = 0; k < 2; k++) {
        fake_reset();
        ring *r = open_on_untouched_pages(SHORT_US);        /* all of it may take 2 ms, and 32 ranges a little more than 0.25 */
        script s = { 0 };
        script_move(&s, RING_COPY, kinds[k], 1, MANY, 8);
        int status = submit(r, 1, &s, 10000);
        CHECK_EQ(status, RING_QUEUED);
        if (status == RING_QUEUED)
            CHECK_DONE(next_completion(r), 1, RING_DONE, 8 * MANY, MANY);
        for (uint64_t i = 0; i < fake.logged; i++)
            CHECK_EQ(is_here(i), i < FIRST_LOOK);
        close_ring(r);
    }
}

TEST(test_submitting_call_goes_on_as_long_as_it_is_in_time)
{
    static const int kinds[] = { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_DEVICE_TO_DEVICE };
    for (int k = 0; k < 2; k++) {
        fake_reset();
        ring *r = open_on_untouched_pages(LONG_US);
        script s = { 0 };
        ring_completion ran;
        script_move(&s, RING_COPY, kinds[k], 1, MANY, 8);
        CHECK_EQ(ring_submit(r, 1, s.steps, s.count, 10000, &ran), RING_RAN);
        CHECK_DONE(ran, 1, RING_DONE, 8 * MANY, MANY);
        close_ring(r);
    }
}

/* In windows of 256 KiB at most, however large those of background work have become since. */
TEST(test_windows_in_the_submitting_call_are_small_in_background_work_too)
{
    enum { LARGE = 1 << 20, IN_CALL = 256 << 10, BLOCKS = 16 };
    fake_reset();
    ring *r = open_ring_with((ring_options){ 8, LARGE, LARGE, PATIENCE_MS, 0, PATIENCE_MS, 0, LARGE, LONG_US, LONG_US });
    script long_one = { 0 }, s = { 0 };
    ring_completion ran;
    script_copy(&long_one, 1, BLOCKS, LARGE);
    CHECK_EQ(ring_submit_as(r, RING_BACKGROUND, 1, long_one.steps, 1, PATIENCE_MS, &ran), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_DONE, (uint64_t)BLOCKS * LARGE, BLOCKS);     /* so it is known how fast windows land */
    script_copy(&s, 2, BLOCKS, LARGE / BLOCKS);
    uint64_t before = fake_calls(SYNC_STREAM);
    CHECK_EQ(ring_submit_as(r, RING_BACKGROUND, 2, s.steps, 1, PATIENCE_MS, &ran), RING_RAN);
    CHECK_DONE(ran, 2, RING_DONE, LARGE, BLOCKS);
    CHECK_EQ(fake_calls(SYNC_STREAM) - before, LARGE / IN_CALL);                        /* one for each window */
    close_ring(r);
}

/* It took more than a thousand times as long as on fast memory, so the next one is not expected to be short; after enough that were
 * fast, one is again. */
TEST(test_ring_learns_how_slow_its_programs_are)
{
    fake_reset();
    fake_stop(GET);
    ring *r = open_expecting(100);
    script s = { 0 }, small = { 0 };
    ring_completion ran;
    pthread_t other;
    script_move(&s, RING_GET, 0, 1, WINDOW_RANGES, 2048);
    script_move(&small, RING_GET, 0, 2, 1, 8);
    CHECK_EQ(pthread_create(&other, NULL, let_go_late, NULL), 0);
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);         /* the rest of it */
    pthread_join(other, NULL);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 2048 * WINDOW_RANGES, WINDOW_RANGES);
    CHECK(is_here(0));
    uint64_t next = fake.logged;
    CHECK_EQ(submit(r, 1, &s, 10000), RING_QUEUED);
    CHECK_DONE(next_completion(r), 1, RING_DONE, 2048 * WINDOW_RANGES, WINDOW_RANGES);
    CHECK(!is_here(next));
    CHECK_EQ(ring_submit(r, 2, small.steps, 1, 10000, &ran), RING_RAN);     /* few bytes are short all the same */
    int status = RING_QUEUED;
    for (int i = 0; i < 10000 && status == RING_QUEUED; i++) {
        status = ring_submit(r, 1, s.steps, s.count, 10000, &ran);
        if (status == RING_QUEUED)
            next_completion(r);
    }
    CHECK_EQ(status, RING_RAN);
    close_ring(r);
}

TEST(test_run_of_many_blocks)
{
    enum { COUNT = 4096 };
    static uint64_t numbers[2 * COUNT + 2];
    fake_reset();
    ring *r = open_expecting(LONG_US);
    script s = { 0 };
    script_move(&s, RING_GET, 0, 1, 1, 8);
    for (int i = 0; i < COUNT; i++) {
        numbers[i] = (uint64_t)(COUNT - i);                 /* not ascending: repetition is looked for */
        numbers[COUNT + i] = (uint64_t)(2 * i);
    }
    ring_blocks b = { .on = r, .step = s.steps, .numbers = numbers, .local_limit = COUNT + 1, .remote_limit = 2 * COUNT, .id = 7, .timeout_ms = 1000 };
    CHECK_EQ(ring_run_blocks(&b, COUNT), RING_RAN);
    CHECK_DONE(b.ran, 7, RING_DONE, 8 * COUNT, COUNT);
    CHECK_EQ(ring_run_blocks(&b, COUNT + 1), RING_LATER);
    numbers[COUNT - 1] = numbers[0];
    CHECK_EQ(ring_run_blocks(&b, COUNT), RING_OUTSIDE);
    CHECK_EQ(fake.landed[1], 8 * COUNT);
    close_ring(r);
}

int main(void)
{
    RUN(test_many_ranges_run_in_the_submitting_call);
    RUN(test_many_ranges_are_not_expected_to_be_short);
    RUN(test_worker_issues_the_rest_if_the_device_is_not_done_with_a_window);
    RUN(test_a_program_that_was_left_to_the_worker_can_be_cancelled);
    RUN(test_submitting_call_that_takes_longer_than_expected_leaves_the_rest);
    RUN(test_submitting_call_looks_at_the_clock_within_a_window);
    RUN(test_submitting_call_goes_on_as_long_as_it_is_in_time);
    RUN(test_windows_in_the_submitting_call_are_small_in_background_work_too);
    RUN(test_ring_learns_how_slow_its_programs_are);
    RUN(test_run_of_many_blocks);
    return check_done();
}
