/* Heartbeats with keys: what is changed, added or repeated on the way is no sign of life. Turns have times of our own. */
#include "check.h"
#include "blake2b.h"
#include "heartbeats.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>

enum { INTERVAL = 100, SILENCE = 400 };   /* of no unit */

typedef struct pair { int ours, theirs; uint64_t line; } pair;

static uint8_t keys[2 * HEARTBEATS_KEY];  /* ours, then the peer's */

static pair make_pair(void)
{
    int both[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both))
        abort();
    for (int i = 0; i < 2 * HEARTBEATS_KEY; i++)
        keys[i] = (uint8_t)(i + 1);
    return (pair){ both[0], both[1], 0 };
}

static heartbeats *open_with(pair *p)
{
    heartbeats *h = NULL;
    *p = make_pair();
    CHECK_EQ(heartbeats_open(INTERVAL, &h), 0);
    heartbeats_turn(h, 0);
    CHECK_EQ(heartbeats_watch(h, p->ours, SILENCE, 0, keys, &p->line), 0);
    return h;
}

static void make_beat(const uint8_t *key, uint64_t counter, uint8_t *beat)
{
    for (int i = 0; i < 8; i++)
        beat[i] = (uint8_t)(counter >> (56 - 8 * i));
    blake2b_seal(key, HEARTBEATS_KEY, beat, 8, beat + 8);
}

static void say(const pair *p, uint64_t counter)
{
    uint8_t beat[HEARTBEATS_BEAT];
    make_beat(keys + HEARTBEATS_KEY, counter, beat);
    CHECK_EQ(send(p->theirs, beat, sizeof beat, MSG_NOSIGNAL), sizeof beat);
}

static int next_kind(heartbeats *h)
{
    heartbeats_news news = { 0 };
    return heartbeats_reap(h, &news) ? news.kind : 0;
}

static void run_to(heartbeats *h, int64_t from, int64_t to)      /* a turn whenever one may be due */
{
    for (int64_t now = from; now < to; now += INTERVAL / 2)
        heartbeats_turn(h, now);
    heartbeats_turn(h, to);
}

static void end_of(heartbeats *h, const pair *p)
{
    heartbeats_close(h);
    close(p->theirs);
}

TEST(test_each_beat_has_a_counter_and_its_seal)
{
    pair p;
    heartbeats *h = open_with(&p);
    heartbeats_turn(h, INTERVAL);
    for (uint64_t counter = 0; counter < 2; counter++) {
        uint8_t got[HEARTBEATS_BEAT], want[HEARTBEATS_BEAT];
        CHECK_EQ(recv(p.theirs, got, sizeof got, 0), sizeof got);
        make_beat(keys, counter, want);
        CHECK(memcmp(got, want, sizeof got) == 0);
    }
    end_of(h, &p);
}

TEST(test_beats_are_heard_however_they_are_cut)
{
    pair p;
    heartbeats *h = open_with(&p);
    uint8_t beats[2 * HEARTBEATS_BEAT];
    make_beat(keys + HEARTBEATS_KEY, 0, beats);
    make_beat(keys + HEARTBEATS_KEY, 1, beats + HEARTBEATS_BEAT);
    for (int i = 0; i < 2 * HEARTBEATS_BEAT; i++) {
        CHECK_EQ(send(p.theirs, beats + i, 1, MSG_NOSIGNAL), 1);
        heartbeats_turn(h, i);
        CHECK_EQ(next_kind(h), i == HEARTBEATS_BEAT - 1 ? HEARTBEATS_BEGUN : 0);
    }
    run_to(h, 47, 47 + SILENCE - 1);
    CHECK_EQ(next_kind(h), 0);
    heartbeats_turn(h, 47 + SILENCE);
    CHECK_EQ(next_kind(h), HEARTBEATS_SILENT);
    end_of(h, &p);
}

TEST(test_a_changed_beat_ends_the_line)
{
    for (int bit = 0; bit < 8 * HEARTBEATS_BEAT; bit++) {
        pair p;
        heartbeats *h = open_with(&p);
        uint8_t beat[HEARTBEATS_BEAT];
        make_beat(keys + HEARTBEATS_KEY, 0, beat);
        beat[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_EQ(send(p.theirs, beat, sizeof beat, MSG_NOSIGNAL), sizeof beat);
        heartbeats_turn(h, 1);
        CHECK_EQ(next_kind(h), HEARTBEATS_FORGED);
        CHECK_EQ(next_kind(h), 0);
        while (recv(p.theirs, beat, sizeof beat, 0) > 0);
        CHECK_EQ(recv(p.theirs, beat, sizeof beat, 0), 0);       /* closed */
        heartbeats_stop(h, p.line);
        end_of(h, &p);
    }
}

TEST(test_our_own_beat_sent_back_ends_the_line)
{
    pair p;
    heartbeats *h = open_with(&p);
    uint8_t beat[HEARTBEATS_BEAT];
    make_beat(keys, 0, beat);
    CHECK_EQ(send(p.theirs, beat, sizeof beat, MSG_NOSIGNAL), sizeof beat);
    heartbeats_turn(h, 1);
    CHECK_EQ(next_kind(h), HEARTBEATS_FORGED);
    end_of(h, &p);
}

TEST(test_a_repeated_or_late_beat_is_no_sign_of_life)
{
    pair p;
    heartbeats *h = open_with(&p);
    say(&p, 7);
    heartbeats_turn(h, 0);
    CHECK_EQ(next_kind(h), HEARTBEATS_BEGUN);
    for (int64_t now = 1; now < SILENCE; now += INTERVAL) {
        say(&p, 7);
        say(&p, 6);
        heartbeats_turn(h, now);
    }
    heartbeats_turn(h, SILENCE);
    CHECK_EQ(next_kind(h), HEARTBEATS_SILENT);
    say(&p, UINT64_MAX - 1);
    heartbeats_turn(h, SILENCE + 1);
    CHECK_EQ(next_kind(h), 0);
    say(&p, 8);
    run_to(h, SILENCE + 1, 2 * SILENCE + 1);
    CHECK_EQ(next_kind(h), HEARTBEATS_SILENT);
    end_of(h, &p);
}

TEST(test_half_a_beat_is_no_sign_of_life)
{
    pair p;
    heartbeats *h = open_with(&p);
    uint8_t beat[HEARTBEATS_BEAT];
    make_beat(keys + HEARTBEATS_KEY, 0, beat);
    for (int i = 0; i < HEARTBEATS_BEAT - 1; i++)
        CHECK_EQ(send(p.theirs, beat + i, 1, MSG_NOSIGNAL), 1);
    heartbeats_turn(h, SILENCE / 2);
    heartbeats_turn(h, SILENCE);
    CHECK_EQ(next_kind(h), HEARTBEATS_SILENT);
    end_of(h, &p);
}

/* Any process on the way can send what the kernel counts as life. */
TEST(test_signs_of_life_elsewhere_count_for_a_while)
{
    pair p;
    heartbeats *h = open_with(&p);
    say(&p, 0);
    heartbeats_turn(h, 0);
    CHECK_EQ(next_kind(h), HEARTBEATS_BEGUN);
    int64_t now = 0;
    for (int times = 0; times < 3; times++) {
        now += SILENCE;
        heartbeats_turn(h, now - SILENCE / 2);
        heartbeats_turn(h, now);
        CHECK_EQ(next_kind(h), HEARTBEATS_SILENT);
        CHECK_EQ(heartbeats_excuse(h, p.line, 0), 1);
    }
    now += SILENCE;
    heartbeats_turn(h, now - SILENCE / 2);
    heartbeats_turn(h, now);
    CHECK_EQ(next_kind(h), HEARTBEATS_SILENT);
    CHECK_EQ(heartbeats_excuse(h, p.line, 0), 0);
    CHECK_EQ(heartbeats_excuse(h, p.line + 1, 0), 0);
    end_of(h, &p);
}

TEST(test_a_beat_of_which_the_kernel_takes_a_part_is_finished_first)
{
    pair p;
    heartbeats *h = open_with(&p);
    int least = 1;
    setsockopt(p.ours, SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
    for (int64_t now = INTERVAL; now < 20000 * INTERVAL; now += INTERVAL)
        heartbeats_turn(h, now);
    uint8_t got[HEARTBEATS_BEAT], want[HEARTBEATS_BEAT];
    uint64_t last = 0, count = 0;
    while (recv(p.theirs, got, sizeof got, MSG_WAITALL) == sizeof got) {
        uint64_t counter = 0;
        for (int i = 0; i < 8; i++)
            counter = counter << 8 | got[i];
        make_beat(keys, counter, want);
        CHECK(memcmp(got, want, sizeof got) == 0);
        CHECK(count == 0 || counter > last);
        last = counter;
        count++;
    }
    CHECK(count > 1);
    heartbeats_turn(h, 20001 * INTERVAL);
    CHECK_EQ(recv(p.theirs, got, sizeof got, 0), sizeof got);
    CHECK(memcmp(got, want, 8) > 0);
    end_of(h, &p);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SEES_ALL_MEMORY = false };         /* a sanitizer keeps what is freed, and maps more than can be read */
#else
enum { SEES_ALL_MEMORY = true };
#endif

static uint8_t odd(int i)                 /* a key that stands in no table */
{
    return (uint8_t)(i * 89 + 57);
}

static int places_of_odd_key(void)        /* in all memory of this process that it may write */
{
    static uint8_t window[1 << 16];
    FILE *maps = fopen("/proc/self/maps", "re");
    int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC), found = 0;
    char row[512], rights[8];
    uint64_t from, to;
    while (fgets(row, sizeof row, maps)) {
        if (sscanf(row, "%" SCNx64 "-%" SCNx64 " %7s", &from, &to, rights) != 3 || strncmp(rights, "rw", 2))
            continue;
        for (uint64_t at = from; at < to; at += sizeof window - HEARTBEATS_KEY + 1) {
            int64_t got = pread(memory, window, to - at < sizeof window ? to - at : sizeof window, (off_t)at);
            for (int64_t i = 0; i + HEARTBEATS_KEY <= got; i++) {
                int same = 0;
                while (same < HEARTBEATS_KEY && window[i + same] == odd(same))
                    same++;
                bool is_our_copy = at + (uint64_t)i - (uint64_t)window < sizeof window;
                found += same == HEARTBEATS_KEY && !is_our_copy;
            }
        }
    }
    close(memory);
    fclose(maps);
    return found;
}

TEST(test_keys_are_wiped_with_their_line)
{
    if (!SEES_ALL_MEMORY)
        return;
    pair p;
    heartbeats *h = open_with(&p);        /* the linker, which looks up functions at their first call, saves registers */
    say(&p, 0);
    run_to(h, 0, INTERVAL);
    CHECK_EQ(places_of_odd_key(), 0);
    end_of(h, &p);
    for (int is_closed = 0; is_closed < 2; is_closed++) {
        p = make_pair();
        for (int i = 0; i < HEARTBEATS_KEY; i++)
            keys[HEARTBEATS_KEY + i] = odd(i);
        CHECK_EQ(heartbeats_open(INTERVAL, &h), 0);
        heartbeats_turn(h, 0);
        CHECK_EQ(heartbeats_watch(h, p.ours, SILENCE, 0, keys, &p.line), 0);
        say(&p, 0);
        explicit_bzero(keys, sizeof keys);
        run_to(h, 0, INTERVAL);           /* which checks the seal of the peer's beat */
        CHECK_EQ(next_kind(h), HEARTBEATS_BEGUN);
        CHECK_EQ(places_of_odd_key(), 1);
        if (!is_closed) {
            heartbeats_stop(h, p.line);
            CHECK_EQ(places_of_odd_key(), 0);
        }
        end_of(h, &p);
        CHECK_EQ(places_of_odd_key(), 0);
    }
}

int main(void)
{
    RUN(test_keys_are_wiped_with_their_line);
    RUN(test_each_beat_has_a_counter_and_its_seal);
    RUN(test_beats_are_heard_however_they_are_cut);
    RUN(test_a_changed_beat_ends_the_line);
    RUN(test_our_own_beat_sent_back_ends_the_line);
    RUN(test_a_repeated_or_late_beat_is_no_sign_of_life);
    RUN(test_half_a_beat_is_no_sign_of_life);
    RUN(test_signs_of_life_elsewhere_count_for_a_while);
    RUN(test_a_beat_of_which_the_kernel_takes_a_part_is_finished_first);
    return check_done();
}
