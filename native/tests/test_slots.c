/* Slots: wrong ones are found, users of one do not meet, and pieces name each token's bytes once. */
#include "check.h"
#include "slots.h"

enum { MAPPINGS = 2000, MOST_TOKENS = 200, MOST_VALUES = 12, SLOTS = 300, TOKEN_BYTES = 24 };

static uint64_t seed = 20261121;
static uint64_t below(uint64_t n)                           /* splitmix64 */
{
    uint64_t z = seed += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % n;
}

TEST(test_wrong_slots_are_found_and_named)
{
    int64_t fine[] = { 4, 0, 9, 8 }, outside[] = { 4, 10, 4 }, below_0[] = { 1, 2, -1 }, twice[] = { 7, 3, 7, 3 };
    uint64_t at = 99;
    CHECK_EQ(slots_check(fine, NULL, 4, 10, &at), SLOTS_OK);
    CHECK_EQ(slots_check(fine, NULL, 0, 0, &at), SLOTS_OK);
    CHECK_EQ(slots_check(outside, NULL, 3, 10, &at), SLOTS_OUTSIDE);
    CHECK_EQ(at, 1);
    CHECK_EQ(slots_check(below_0, NULL, 3, 10, &at), SLOTS_OUTSIDE);
    CHECK_EQ(at, 2);
    CHECK_EQ(slots_check(twice, NULL, 4, 10, &at), SLOTS_TWICE);
    CHECK_EQ(at, 2);
}

TEST(test_wrong_runs_are_found_and_named)
{
    int64_t starts[] = { 6, -5, 0, 64 }, lengths[] = { 4, 0, 6, 64 }, huge[] = { INT64_MAX }, one[] = { 1 }, most[] = { INT64_MAX };
    uint64_t at = 99;
    CHECK_EQ(slots_check(starts, lengths, 4, 128, &at), SLOTS_OK);      /* a run of nothing may start anywhere */
    CHECK_EQ(slots_check(starts, lengths, 4, 127, &at), SLOTS_OUTSIDE);
    CHECK_EQ(at, 3);
    starts[2] = 1;
    CHECK_EQ(slots_check(starts, lengths, 4, 128, &at), SLOTS_TWICE);
    CHECK_EQ(at, 2);
    CHECK_EQ(slots_check(huge, one, 1, 128, &at), SLOTS_OUTSIDE);
    CHECK_EQ(slots_check(one, most, 1, 128, &at), SLOTS_OUTSIDE);
    int64_t negative[] = { -1 };
    CHECK_EQ(slots_check(one, negative, 1, 128, &at), SLOTS_OUTSIDE);
}

TEST(test_readers_share_and_a_writer_is_alone)
{
    uint16_t map[16] = { 0 };
    int64_t starts[] = { 2, 8 }, lengths[] = { 3, 2 }, other[] = { 0, 4 };
    uint64_t at = 99;
    CHECK_EQ(slots_take(map, starts, lengths, 2, 0, &at), SLOTS_OK);
    CHECK_EQ(slots_take(map, starts, lengths, 2, 0, &at), SLOTS_OK);
    CHECK_EQ(slots_take(map, other, NULL, 2, 1, &at), SLOTS_BUSY);
    CHECK_EQ(at, 1);
    CHECK_EQ(map[0], SLOTS_FREE);                           /* all or nothing */
    slots_give(map, starts, lengths, 2);
    slots_give(map, starts, lengths, 2);
    CHECK_EQ(slots_take(map, other, NULL, 2, 1, &at), SLOTS_OK);
    CHECK_EQ(slots_take(map, starts, lengths, 2, 0, &at), SLOTS_BUSY);
    CHECK_EQ(at, 0);
    CHECK_EQ(slots_take(map, other, NULL, 2, 1, &at), SLOTS_BUSY);
    slots_give(map, other, NULL, 2);
    for (int i = 0; i < 16; i++)
        CHECK_EQ(map[i], SLOTS_FREE);
    map[5] = SLOTS_READERS;
    int64_t full[] = { 5 };
    CHECK_EQ(slots_take(map, full, NULL, 1, 0, &at), SLOTS_BUSY);
}

typedef struct mapping {
    int64_t slots[MOST_TOKENS];
    uint64_t tokens[MOST_VALUES], addresses[MOST_VALUES], values, total;
} mapping;

/* Distinct slots: runs up, runs down, and jumps, cut into values; some of them are left out. */
static void make_mapping(mapping *m)
{
    uint64_t step = 1 + 2 * below(3), from = below(SLOTS);
    m->total = 0;
    m->values = below(MOST_VALUES + 1);
    for (uint64_t i = 0; i < m->values; i++) {
        m->tokens[i] = 1 + below(MOST_TOKENS / MOST_VALUES);
        m->addresses[i] = below(4) ? (i + 1) << 20 : 0;
        for (uint64_t t = 0; t < m->tokens[i]; t++, m->total++)
            m->slots[m->total] = (int64_t)((from + m->total * step + (below(9) ? 0 : 2 * SLOTS * (m->total + 1))) % (1ULL << 40));
        if (below(2))
            for (uint64_t a = m->total - m->tokens[i], b = m->total - 1; a < b; a++, b--) {
                int64_t slot = m->slots[a];
                m->slots[a] = m->slots[b];
                m->slots[b] = slot;
            }
    }
}

TEST(test_pieces_name_the_bytes_of_each_token_once)
{
    printf("seed %llu\n", (unsigned long long)seed);
    for (int k = 0; k < MAPPINGS; k++) {
        mapping m;
        make_mapping(&m);
        uint64_t starts[MOST_TOKENS], places[MOST_TOKENS], wrong = 0, pieces = 0, seen = 0, wanted = 0;
        slots_class classes[MOST_TOKENS];
        slots_values values = { m.slots, m.tokens, m.addresses, m.values, TOKEN_BYTES, 0 };
        int64_t known = slots_pieces(&values, starts, places, classes);
        for (int64_t c = 0; c < known; c++) {
            CHECK_EQ(classes[c].first, pieces);
            pieces += classes[c].count;
            for (int64_t other = 0; other < c; other++)
                wrong += classes[c].tokens == classes[other].tokens && classes[c].run == classes[other].run;
            for (uint64_t p = classes[c].first; p < pieces; p++) {
                uint64_t value = (places[p] >> 20) - 1, offset = (places[p] & 0xfffff) / TOKEN_BYTES, before = 0;
                wrong += value >= m.values || classes[c].tokens != m.tokens[value] || offset + classes[c].run > m.tokens[value];
                for (uint64_t i = 0; i < value; i++)
                    before += m.tokens[i];
                for (uint64_t t = 0; t < classes[c].run; t++, seen++)
                    wrong += m.slots[before + offset + t] != (int64_t)(starts[p] + t);
                if (offset)                                 /* maximal: the token before is not the slot before */
                    wrong += m.slots[before + offset - 1] + 1 == (int64_t)starts[p];
            }
        }
        for (uint64_t i = 0; i < m.values; i++)
            wanted += m.addresses[i] ? m.tokens[i] : 0;
        CHECK_EQ(wrong, 0);
        CHECK_EQ(seen, wanted);
    }
}

TEST(test_whole_values_are_one_piece_each)
{
    int64_t slots[] = { 40, 7, 0, 16 };
    uint64_t tokens[] = { 16, 16, 0, 5 }, addresses[] = { 1000, 5000, 9000, 9000 }, starts[4], places[4];
    slots_class classes[4];
    slots_values values = { slots, tokens, addresses, 4, TOKEN_BYTES, 1 };
    CHECK_EQ(slots_pieces(&values, starts, places, classes), 2);
    CHECK_EQ(classes[0].tokens, 5);
    CHECK_EQ(classes[0].run, 5);
    CHECK_EQ(classes[0].count, 1);
    CHECK_EQ(classes[1].count, 2);
    CHECK_EQ(starts[classes[1].first], 40);
    CHECK_EQ(places[classes[1].first + 1], 5000);
}

int main(void)
{
    RUN(test_wrong_slots_are_found_and_named);
    RUN(test_wrong_runs_are_found_and_named);
    RUN(test_readers_share_and_a_writer_is_alone);
    RUN(test_pieces_name_the_bytes_of_each_token_once);
    RUN(test_whole_values_are_one_piece_each);
    return check_done();
}
