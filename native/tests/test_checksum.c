/* CRC-32C: what others say it is, the same by instruction and by tables, at every length and alignment, in pieces and at once. */
#include "check.h"
#include "checksum.h"

enum { ROOM = 20 << 10 };
static uint8_t bytes[ROOM];

/* Bit by bit, as the definition has it. */
static uint32_t slow(const uint8_t *at, size_t count)
{
    uint32_t sum = 0xffffffffu;
    for (size_t i = 0; i < count; i++) {
        sum ^= at[i];
        for (int bit = 0; bit < 8; bit++)
            sum = (sum >> 1) ^ (sum & 1 ? 0x82f63b78u : 0);
    }
    return ~sum;
}

TEST(test_known_values)                                     /* RFC 3720, B.4 */
{
    uint8_t some[32];
    CHECK_EQ(checksum_of(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ(checksum_of(0, NULL, 0), 0);
    memset(some, 0, sizeof some);
    CHECK_EQ(checksum_of(0, some, sizeof some), 0x8a9136aau);
    memset(some, 0xff, sizeof some);
    CHECK_EQ(checksum_of(0, some, sizeof some), 0x62a8ab43u);
    for (uint8_t i = 0; i < 32; i++)
        some[i] = i;
    CHECK_EQ(checksum_of(0, some, sizeof some), 0x46dd794eu);
}

TEST(test_every_length_and_alignment)
{
    static const size_t lengths[] = { 1023, 1024, 3071, 3072, 3073, 6143, 6144, 6151, 9216, 12345, ROOM - 64 };
    for (size_t count = 0; count < 200; count++)
        for (size_t at = 0; at < 9; at++) {
            CHECK_EQ(checksum_of(0, bytes + at, count), slow(bytes + at, count));
            CHECK_EQ(checksum_of_by_tables(0, bytes + at, count), slow(bytes + at, count));
        }
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t at = 0; at < 17; at += 3) {
            CHECK_EQ(checksum_of(0, bytes + at, lengths[i]), slow(bytes + at, lengths[i]));
            CHECK_EQ(checksum_of_by_tables(0, bytes + at, lengths[i]), slow(bytes + at, lengths[i]));
        }
}

TEST(test_in_pieces_it_is_the_same)
{
    for (size_t cut = 0; cut < ROOM; cut += 997)
        CHECK_EQ(checksum_of(checksum_of(0, bytes, cut), bytes + cut, ROOM - cut), slow(bytes, ROOM));
}

TEST(test_every_bit_counts)
{
    uint32_t whole = checksum_of(0, bytes, 10000);
    for (size_t i = 0; i < 10000; i += 61) {
        bytes[i] ^= (uint8_t)(1 << i % 8);
        CHECK(checksum_of(0, bytes, 10000) != whole);
        bytes[i] ^= (uint8_t)(1 << i % 8);
    }
}

TEST(test_blocks_are_summed_through_their_tensors)
{
    uint64_t base[] = { (uintptr_t)bytes, (uintptr_t)(bytes + 5000) }, index[] = { 3, 0, 7 };
    uint32_t sums[] = { 0, 0, 0 };
    checksum_blocks(sums, base, 2, index, 3, 100, 90, 17);
    for (int i = 0; i < 3; i++) {
        uint64_t count = i < 2 ? 90 : 17;
        uint32_t first = checksum_of(0, bytes + index[i] * 100, count);
        CHECK_EQ(sums[i], checksum_of(first, bytes + 5000 + index[i] * 100, count));
    }
}

int main(void)
{
    for (size_t i = 0; i < ROOM; i++)
        bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    RUN(test_known_values);
    RUN(test_every_length_and_alignment);
    RUN(test_in_pieces_it_is_the_same);
    RUN(test_every_bit_counts);
    RUN(test_blocks_are_summed_through_their_tensors);
    printf("by %s\n", checksum_is_fast() ? "an instruction" : "tables");
    return check_done();
}
