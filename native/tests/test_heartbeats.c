/* Heartbeats: by turns with times of our own, and by the thread. */
#include "check.h"
#include "heartbeats.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>

enum { INTERVAL = 100, SILENCE = 400 };   /* of no unit, where turns are told the time */

typedef struct pair { int ours, theirs; uint64_t line; } pair;

static pair make_pair(void)
{
    int both[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both))
        abort();
    return (pair){ both[0], both[1], 0 };
}

static pair watched(heartbeats *h, int64_t silence, int64_t patience)
{
    pair p = make_pair();
    CHECK_EQ(heartbeats_watch(h, p.ours, silence, patience, NULL, &p.line), 0);
    return p;
}

static int beats(const pair *p)           /* that came; -1: the connection is closed */
{
    char bytes[64];
    ssize_t count = recv(p->theirs, bytes, sizeof bytes, MSG_DONTWAIT);
    return count > 0 ? (int)count : count == 0 ? -1 : 0;
}

static void say(const pair *p)
{
    CHECK_EQ(send(p->theirs, "x", 1, MSG_NOSIGNAL), 1);
}

static int next_kind(heartbeats *h, const pair *p)
{
    heartbeats_news news;
    if (!heartbeats_reap(h, &news))
        return 0;
    CHECK_EQ(news.line, p->line);
    return news.kind;
}

static bool bell_rings(const heartbeats *h)
{
    struct pollfd bell = { .fd = heartbeats_fd(h), .events = POLLIN };
    return poll(&bell, 1, 0) == 1;
}

static heartbeats *open_at(int64_t now)
{
    heartbeats *h = NULL;
    CHECK_EQ(heartbeats_open(INTERVAL, &h), 0);
    heartbeats_turn(h, now);
    return h;
}

static void run_to(heartbeats *h, int64_t from, int64_t to)     /* a turn whenever one may be due */
{
    for (int64_t now = from; now <= to; now += INTERVAL / 2)
        heartbeats_turn(h, now);
}

static int open_files(void)
{
    int count = 0;
    DIR *all = opendir("/proc/self/fd");
    while (readdir(all))
        count++;
    closedir(all);
    return count;
}

TEST(test_first_beat_goes_out_at_once_and_one_each_interval)
{
    heartbeats *h = open_at(1000);
    pair p = watched(h, SILENCE, 0);
    CHECK_EQ(beats(&p), 1);
    CHECK_EQ(heartbeats_turn(h, 1000), 1000 + INTERVAL);
    CHECK_EQ(beats(&p), 0);
    CHECK_EQ(heartbeats_turn(h, 1000 + INTERVAL), 1000 + 2 * INTERVAL);
    CHECK_EQ(beats(&p), 1);
    heartbeats_close(h);
    CHECK_EQ(beats(&p), -1);
    close(p.theirs);
}

TEST(test_silence_is_news_once_and_no_end)
{
    heartbeats *h = open_at(0);
    heartbeats_news news;
    pair p = watched(h, SILENCE, 0);
    run_to(h, 0, SILENCE - 1);
    CHECK(!bell_rings(h));
    run_to(h, SILENCE, 2 * SILENCE);
    CHECK(bell_rings(h));
    CHECK_EQ(heartbeats_reap(h, &news), 1);
    CHECK_EQ(news.kind, HEARTBEATS_SILENT);
    CHECK_EQ(news.line, p.line);
    CHECK_EQ(news.silent_ns, 2 * SILENCE);
    CHECK_EQ(heartbeats_reap(h, &news), 0);
    CHECK(!bell_rings(h));
    CHECK_EQ(beats(&p), 1 + 2 * SILENCE / INTERVAL);        /* to the end */
    say(&p);                                                /* heard again: its next silence is news again */
    run_to(h, 2 * SILENCE, 3 * SILENCE + INTERVAL);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_BEGUN);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    heartbeats_close(h);
    close(p.theirs);
}

TEST(test_silence_that_ended_before_it_was_reaped_is_no_news)
{
    heartbeats *h = open_at(0);
    pair p = watched(h, SILENCE, 0);
    say(&p);
    run_to(h, 0, SILENCE);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_BEGUN);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    say(&p);
    run_to(h, SILENCE, 2 * SILENCE);                        /* silent again, and not reaped */
    say(&p);
    CHECK_EQ(next_kind(h, &p), 0);                          /* the thread had no turn yet */
    heartbeats_close(h);
    close(p.theirs);
}

TEST(test_time_in_which_the_thread_did_not_run_is_no_silence)
{
    heartbeats *h = open_at(0);
    pair p = watched(h, SILENCE, 0);
    run_to(h, 0, INTERVAL);
    heartbeats_turn(h, 50 * SILENCE);                       /* all was stopped */
    CHECK_EQ(next_kind(h, &p), 0);
    run_to(h, 50 * SILENCE, 51 * SILENCE - 1);
    CHECK_EQ(next_kind(h, &p), 0);
    run_to(h, 51 * SILENCE, 51 * SILENCE);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    heartbeats_close(h);
    close(p.theirs);
}

TEST(test_small_delays_of_the_thread_do_not_put_off_the_news)
{
    heartbeats *h = open_at(0);
    pair p = watched(h, SILENCE, 0);
    for (int64_t now = 0; now <= SILENCE; now += INTERVAL + SILENCE / 4)
        heartbeats_turn(h, now);
    heartbeats_turn(h, SILENCE);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    heartbeats_close(h);
    close(p.theirs);
}

TEST(test_excuse_counts_from_the_sign_of_life)
{
    heartbeats *h = open_at(0);
    pair p = watched(h, SILENCE, 0);
    run_to(h, 0, SILENCE);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    heartbeats_excuse(h, p.line, 100);
    run_to(h, SILENCE, 2 * SILENCE - 101);
    CHECK_EQ(next_kind(h, &p), 0);
    run_to(h, 2 * SILENCE - 100, 2 * SILENCE - 100);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    heartbeats_excuse(h, p.line, SILENCE);                  /* no sign of life since then */
    heartbeats_turn(h, 2 * SILENCE);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_SILENT);
    heartbeats_close(h);
    close(p.theirs);
}

TEST(test_patience_is_for_the_first_byte)
{
    heartbeats *h = open_at(0);
    pair late = watched(h, SILENCE, 1000), never = watched(h, SILENCE, 1000);
    run_to(h, 0, 900);
    CHECK_EQ(next_kind(h, &late), 0);
    say(&late);
    run_to(h, 900, 900 + SILENCE - 1);
    CHECK_EQ(next_kind(h, &late), HEARTBEATS_BEGUN);
    CHECK_EQ(next_kind(h, &late), 0);
    run_to(h, 900 + SILENCE, 900 + SILENCE);
    CHECK_EQ(next_kind(h, &late), HEARTBEATS_SILENT);
    CHECK_EQ(next_kind(h, &never), 0);
    run_to(h, 900 + SILENCE, 1000 + SILENCE);
    CHECK_EQ(next_kind(h, &never), HEARTBEATS_SILENT);
    heartbeats_close(h);
    close(late.theirs);
    close(never.theirs);
}

TEST(test_end_of_a_connection_is_told_with_its_reason)
{
    heartbeats *h = open_at(0);
    heartbeats_news news;
    pair closed = watched(h, SILENCE, 0), last_word = watched(h, SILENCE, 0);
    close(closed.theirs);
    heartbeats_turn(h, 1);
    CHECK_EQ(heartbeats_reap(h, &news), 1);
    CHECK_EQ(news.line, closed.line);
    CHECK_EQ(news.kind, HEARTBEATS_BROKEN);                 /* our first beat was not read */
    CHECK_EQ(news.code, ECONNRESET);
    beats(&last_word);
    say(&last_word);
    close(last_word.theirs);
    heartbeats_turn(h, 2);
    heartbeats_turn(h, 3);
    CHECK_EQ(next_kind(h, &last_word), HEARTBEATS_BEGUN);
    CHECK_EQ(next_kind(h, &last_word), HEARTBEATS_CLOSED);
    run_to(h, 4, 3 * SILENCE);
    CHECK_EQ(next_kind(h, &last_word), 0);
    heartbeats_close(h);
}

TEST(test_stop_closes_and_a_slot_in_new_use_is_another_line)
{
    heartbeats *h = open_at(0);
    pair first = watched(h, SILENCE, 0), second = watched(h, SILENCE, 0), third = watched(h, SILENCE, 0);
    run_to(h, 0, SILENCE);                                  /* all three have news */
    heartbeats_stop(h, second.line);
    heartbeats_stop(h, second.line);
    beats(&second);
    CHECK_EQ(beats(&second), -1);
    pair fourth = watched(h, SILENCE, 0);
    CHECK(fourth.line != second.line);
    CHECK_EQ((uint32_t)fourth.line, (uint32_t)second.line);
    heartbeats_stop(h, second.line);                        /* an old name closes nothing */
    CHECK_EQ(beats(&fourth), 1);
    CHECK_EQ(next_kind(h, &first), HEARTBEATS_SILENT);
    CHECK_EQ(next_kind(h, &third), HEARTBEATS_SILENT);
    CHECK_EQ(next_kind(h, &fourth), 0);
    heartbeats_stop(h, first.line);
    heartbeats_stop(h, third.line);
    heartbeats_stop(h, fourth.line);
    CHECK_EQ(heartbeats_turn(h, 9 * SILENCE), INT64_MAX);   /* nothing to do */
    heartbeats_close(h);
    close(first.theirs), close(second.theirs), close(third.theirs), close(fourth.theirs);
}

TEST(test_peer_that_does_not_read_holds_up_no_other)
{
    enum { MANY = 200 };
    static pair all[MANY];
    static char bytes[1 << 16];
    heartbeats *h = open_at(0);
    pair full = make_pair();
    while (send(full.ours, bytes, sizeof bytes, MSG_DONTWAIT) > 0) { }
    CHECK_EQ(heartbeats_watch(h, full.ours, SILENCE, 0, NULL, &full.line), 0);
    for (int i = 0; i < MANY; i++)
        all[i] = watched(h, SILENCE, 0);
    for (int64_t now = INTERVAL; now <= 2 * SILENCE; now += INTERVAL) {
        for (int i = 0; i < MANY; i++)
            say(&all[i]);
        heartbeats_turn(h, now);
    }
    heartbeats_news news;
    int silent = 0;
    while (heartbeats_reap(h, &news))
        if (news.kind == HEARTBEATS_SILENT) {
            CHECK_EQ(news.line, full.line);
            silent++;
        }
    CHECK_EQ(silent, 1);
    for (int i = 0; i < MANY; i++) {
        CHECK_EQ(beats(&all[i]), 1 + 2 * SILENCE / INTERVAL);
        close(all[i].theirs);
    }
    heartbeats_close(h);
    close(full.theirs);
}

TEST(test_what_cannot_be_watched_stays_the_callers)
{
    heartbeats *h = NULL;
    uint64_t line;
    pair p = make_pair();
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK_EQ(heartbeats_open(0, &h), -EINVAL);
    h = open_at(0);
    CHECK_EQ(heartbeats_watch(h, -1, SILENCE, 0, NULL, &line), -EINVAL);
    CHECK_EQ(heartbeats_watch(h, p.ours, 0, 0, NULL, &line), -EINVAL);
    CHECK_EQ(heartbeats_watch(h, p.ours, SILENCE, -1, NULL, &line), -EINVAL);
    CHECK_EQ(heartbeats_watch(h, file, SILENCE, 0, NULL, &line), -EPERM);         /* cannot be polled */
    CHECK_EQ(close(file), 0);
    CHECK_EQ(heartbeats_watch(h, p.ours, INT64_MAX, INT64_MAX, NULL, &p.line), 0);
    heartbeats_turn(h, INT64_MAX / 2);
    CHECK_EQ(next_kind(h, &p), 0);
    heartbeats_close(h);
    close(p.theirs);
}

/* ---- with the thread ---- */

TEST(test_threads_of_two_ends_keep_each_other_alive_and_leave_nothing)
{
    enum { LINES = 40 };
    static pair lines[LINES];
    int before = open_files();
    heartbeats *h = NULL, *other = NULL;
    heartbeats_news news;
    CHECK_EQ(heartbeats_open(1000000, &h), 0);
    CHECK_EQ(heartbeats_open(1000000, &other), 0);
    CHECK_EQ(heartbeats_start(h), 0);
    CHECK_EQ(heartbeats_start(h), -EINVAL);
    CHECK_EQ(heartbeats_start(other), 0);
    int64_t minute = 60000000000;
    for (int i = 0; i < LINES; i++) {
        uint64_t theirs;
        lines[i] = watched(h, minute, 0);
        CHECK_EQ(heartbeats_watch(other, lines[i].theirs, minute, 0, NULL, &theirs), 0);
    }
    for (int begun = 0; begun < LINES;) {
        struct pollfd bell = { .fd = heartbeats_fd(h), .events = POLLIN };
        poll(&bell, 1, -1);
        while (heartbeats_reap(h, &news)) {
            CHECK_EQ(news.kind, HEARTBEATS_BEGUN);
            begun++;
        }
    }
    for (int i = 0; i < LINES; i += 2)
        heartbeats_stop(h, lines[i].line);
    heartbeats_close(other);
    for (int ended = 0; ended < LINES / 2;) {
        struct pollfd bell = { .fd = heartbeats_fd(h), .events = POLLIN };
        poll(&bell, 1, -1);
        while (heartbeats_reap(h, &news))
            ended += news.kind == HEARTBEATS_CLOSED || news.kind == HEARTBEATS_BROKEN;
    }
    heartbeats_close(h);
    CHECK_EQ(open_files(), before);
}

TEST(test_thread_finds_a_silent_peer)
{
    heartbeats *h = NULL;
    heartbeats_news news;
    CHECK_EQ(heartbeats_open(1000000, &h), 0);
    CHECK_EQ(heartbeats_start(h), 0);
    pair p = watched(h, 20000000, 0);
    struct pollfd bell = { .fd = heartbeats_fd(h), .events = POLLIN };
    CHECK_EQ(poll(&bell, 1, -1), 1);
    CHECK_EQ(heartbeats_reap(h, &news), 1);
    CHECK_EQ(news.kind, HEARTBEATS_SILENT);
    CHECK(news.silent_ns >= 20000000);
    heartbeats_close(h);
    close(p.theirs);
}

TEST(test_forked_child_closes_its_copies_and_the_parent_goes_on)
{
    heartbeats *h = NULL;
    CHECK_EQ(heartbeats_open(1000000, &h), 0);
    CHECK_EQ(heartbeats_start(h), 0);
    pair p = watched(h, 60000000000, 0), other = watched(h, 60000000000, 0);
    pid_t child = fork();
    if (child == 0) {
        uint64_t line;
        heartbeats_news news;
        int failed = heartbeats_watch(h, p.theirs, 1, 0, NULL, &line) != -EINVAL;
        failed |= heartbeats_reap(h, &news) != 0;
        heartbeats_stop(h, p.line);
        heartbeats_close(h);
        _exit(failed);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fcntl(p.theirs, F_SETFL, 0);
    fcntl(other.theirs, F_SETFL, 0);
    char byte;
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(recv(p.theirs, &byte, 1, 0), 1);
        CHECK_EQ(recv(other.theirs, &byte, 1, 0), 1);
    }
    say(&p);                                                /* and it still hears */
    struct pollfd bell = { .fd = heartbeats_fd(h), .events = POLLIN };
    CHECK_EQ(poll(&bell, 1, -1), 1);
    CHECK_EQ(next_kind(h, &p), HEARTBEATS_BEGUN);
    heartbeats_close(h);
    close(p.theirs);
    close(other.theirs);
}

int main(void)
{
    RUN(test_first_beat_goes_out_at_once_and_one_each_interval);
    RUN(test_silence_is_news_once_and_no_end);
    RUN(test_silence_that_ended_before_it_was_reaped_is_no_news);
    RUN(test_time_in_which_the_thread_did_not_run_is_no_silence);
    RUN(test_small_delays_of_the_thread_do_not_put_off_the_news);
    RUN(test_excuse_counts_from_the_sign_of_life);
    RUN(test_patience_is_for_the_first_byte);
    RUN(test_end_of_a_connection_is_told_with_its_reason);
    RUN(test_stop_closes_and_a_slot_in_new_use_is_another_line);
    RUN(test_peer_that_does_not_read_holds_up_no_other);
    RUN(test_what_cannot_be_watched_stays_the_callers);
    RUN(test_threads_of_two_ends_keep_each_other_alive_and_leave_nothing);
    RUN(test_thread_finds_a_silent_peer);
    RUN(test_forked_child_closes_its_copies_and_the_parent_goes_on);
    return check_done();
}
