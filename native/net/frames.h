/* frames.h: what travels on a data connection. Little-endian; each frame begins with a net_frame.
 *
 *   READ,  ranges            answered by DATA and all bytes in the order of the ranges; or by ENDED with a status other than DONE
 *   WRITE, ranges, payload   answered by ENDED. The payload of a refused WRITE is read and discarded
 *
 * A peer that breaks one of these rules loses the channel: the op is known; a request has 1 to NET_MOST_RANGES ranges, none of them
 * empty, that add up to `bytes`, which is at most NET_MOST_BYTES; its part number is above all earlier ones of the connection; at
 * most NET_PEER_PARTS of its parts are under way; an answer is for a part that was asked for, and is of that length.           */
#pragma once
#include <stdint.h>

enum { NET_OP_READ = 1, NET_OP_DATA, NET_OP_WRITE, NET_OP_ENDED };
enum { NET_DONE = 0, NET_STOPPED, NET_NOT_LENT, NET_CLOSING, NET_STATUSES };
enum { NET_MOST_RANGES = 256, NET_MOST_BYTES = 1 << 20, NET_PEER_PARTS = 16 };

typedef struct net_frame {
    uint8_t  op;
    uint8_t  status;                      /* ENDED; otherwise 0 */
    uint16_t ranges;                      /* READ, WRITE: the number of net_range that follow; otherwise 0 */
    uint32_t zero;
    uint64_t part;                        /* chosen by the end that asks */
    uint64_t bytes;                       /* READ, WRITE: of all ranges; DATA: of the payload that follows; ENDED: 0 */
    uint64_t offset;                      /* ENDED: the position of the refused range; otherwise 0 */
} net_frame;

typedef struct net_range { uint64_t address, bytes; } net_range;     /* looked up in what was lent, never followed before */

_Static_assert(sizeof(net_frame) == 32 && sizeof(net_range) == 16, "frames have no gaps");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian"
#endif
