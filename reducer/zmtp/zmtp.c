#include "zmtp.h"

#include "bytes.h"

enum state {
    IN_GREETING,
    AWAITS_READY, /* NULL: either side; CURVE: a client */
    AWAITS_HELLO,
    AWAITS_WELCOME,
    AWAITS_INITIATE,
    AWAITS_ADMISSION, /* the caller is asked, and nothing more is taken */
    IN_TRAFFIC,
    HAS_FAILED
};

enum { FLAG_MORE = 1, FLAG_LONG = 2, FLAG_COMMAND = 4, FLAGS = 7 };

/* Where things lie in a greeting. */
enum {
    SIGNATURE_END = 9, /* its last byte: a flags byte of ZMTP 1.0 would have the low bit clear */
    MAJOR = 10,
    MINOR = 11,
    MECHANISM = 12,
    MECHANISM_BYTES = 20,
    AS_SERVER = 32,
    FIRST_PART = MINOR /* what is sent at once */
};

enum { CONTEXT_BYTES = 16 /* the most in a PING */, METADATA_BYTES = 64 /* more than we write */ };

static const char ERROR_NAME[] = "\5ERROR", READY_NAME[] = "\5READY";
static const char PING_NAME[] = "\4PING", PONG_NAME[] = "\4PONG";
static const char REFUSAL[] = "\5ERROR\3" "400"; /* as libzmq passes on what ZAP says */

/* -- what both directions use ------------------------------------------------------------------ */

static size_t write_header(uint8_t *out, uint64_t nbytes, uint8_t flags)
{
    if (nbytes <= UINT8_MAX) {
        out[0] = flags;
        out[1] = (uint8_t)nbytes;
        return 2;
    }
    out[0] = flags | FLAG_LONG;
    put_u64(out + 1, nbytes);
    return ZMTP_HEADER_BYTES;
}

static enum zmtp_event fail(struct zmtp *zmtp, enum zmtp_fault fault)
{
    zmtp->state = HAS_FAILED;
    zmtp->fault = fault;
    zmtp->buffered = 0;
    if (zmtp->curve != NULL)
        curve_end_handshake(zmtp->curve);
    return ZMTP_FAILED;
}

static enum zmtp_event fail_shut(struct zmtp *zmtp, enum curve_verdict verdict)
{
    return fail(zmtp, verdict == CURVE_SHUT ? ZMTP_WRONG_KEY : ZMTP_MALFORMED);
}

/* Copies what a peer says of itself, for people to read. */
static void copy_text(char *out, const uint8_t *text, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++)
        out[i] = text[i] >= ' ' && text[i] <= '~' ? (char)text[i] : '?';
    out[nbytes] = '\0';
}

/* -- what is said ------------------------------------------------------------------------------ */

/* Room at the end of `reply`; NULL where the caller has not sent what is there. */
static uint8_t *reply_room(struct zmtp *zmtp, size_t nbytes)
{
    if (nbytes > sizeof zmtp->reply - zmtp->reply_bytes)
        return NULL;
    uint8_t *room = zmtp->reply + zmtp->reply_bytes;
    zmtp->reply_bytes += nbytes;
    return room;
}

/* Writes the header of a command of the handshake; NULL: no room. */
static uint8_t *reply_command(struct zmtp *zmtp, size_t nbytes)
{
    uint8_t header[ZMTP_HEADER_BYTES];
    size_t header_bytes = write_header(header, nbytes, FLAG_COMMAND);
    uint8_t *room = reply_room(zmtp, header_bytes + nbytes);
    if (room == NULL)
        return NULL;
    memcpy(room, header, header_bytes);
    return room + header_bytes;
}

static size_t write_property(uint8_t *out, const char *name, const char *value)
{
    size_t name_bytes = strlen(name), value_bytes = strlen(value);
    out[0] = (uint8_t)name_bytes;
    memcpy(out + 1, name, name_bytes);
    uint8_t *at = out + 1 + name_bytes;
    memset(at, 0, 3);
    at[3] = (uint8_t)value_bytes;
    memcpy(at + 4, value, value_bytes);
    return 1 + name_bytes + 4 + value_bytes;
}

/* As libzmq's sockets: the type, and an identity that the peer chooses. */
static size_t write_metadata(const struct zmtp *zmtp, uint8_t out[METADATA_BYTES])
{
    size_t nbytes = write_property(out, "Socket-Type", zmtp->server ? "ROUTER" : "DEALER");
    return nbytes + write_property(out + nbytes, "Identity", "");
}

static bool say_ready(struct zmtp *zmtp)
{
    uint8_t metadata[METADATA_BYTES];
    size_t nbytes = write_metadata(zmtp, metadata);
    size_t before = zmtp->curve == NULL ? sizeof READY_NAME - 1 : CURVE_READY_BYTES;
    uint8_t *out = reply_command(zmtp, before + nbytes);
    if (out == NULL)
        return false;
    if (zmtp->curve != NULL) {
        curve_write_ready(zmtp->curve, out, metadata, nbytes);
    } else {
        memcpy(out, READY_NAME, before);
        memcpy(out + before, metadata, nbytes);
    }
    return true;
}

bool zmtp_init(struct zmtp *zmtp, bool server, const struct curve_keys *keys,
               uint64_t max_frame_bytes)
{
    memset(zmtp, 0, sizeof *zmtp);
    zmtp->server = server;
    zmtp->max_frame_bytes = max_frame_bytes;
    if (keys != NULL && (zmtp->curve = curve_new(server, keys)) == NULL)
        return false;
    uint8_t *greeting = reply_room(zmtp, FIRST_PART); /* zero, as all of it */
    greeting[0] = 0xff;
    greeting[8] = 1; /* ZMTP 1.0 reads the length of an identity, and one of 1.0 goes on so */
    greeting[SIGNATURE_END] = 0x7f;
    greeting[MAJOR] = 3;
    return true;
}

void zmtp_free(struct zmtp *zmtp)
{
    curve_free(zmtp->curve);
    zmtp->curve = NULL;
    zmtp->state = HAS_FAILED;
}

/* -- the greeting ------------------------------------------------------------------------------ */

/* Copies bytes to `keep` until it has `wanted` of them, and says whether it has. */
static bool collect(struct zmtp *zmtp, size_t wanted, const uint8_t **at, const uint8_t *end)
{
    size_t there = (size_t)(end - *at);
    size_t taken = zmtp->buffered >= wanted ? 0 : wanted - zmtp->buffered;
    if (taken > there)
        taken = there;
    if (taken > 0) {
        memcpy(zmtp->buffer + zmtp->buffered, *at, taken);
        zmtp->buffered += taken;
        *at += taken;
    }
    return zmtp->buffered >= wanted;
}

/* Whether this may be the beginning of a greeting of ZMTP 3 or later. */
static bool is_greeting(const uint8_t *bytes, size_t nbytes)
{
    return (nbytes == 0 || bytes[0] == 0xff) &&
           (nbytes <= SIGNATURE_END || (bytes[SIGNATURE_END] & 1) != 0) &&
           (nbytes <= MAJOR || bytes[MAJOR] >= 3);
}

/* Says the rest of the greeting, once the peer has said its version, as libzmq does. Told all of it
 * at once, a libzmq with another mechanism closes before it has said which. */
static bool say_mechanism(struct zmtp *zmtp)
{
    uint8_t *rest = reply_room(zmtp, ZMTP_GREETING_BYTES - FIRST_PART);
    if (rest == NULL)
        return false;
    const char *mechanism = zmtp->curve != NULL ? "CURVE" : "NULL";
    memset(rest, 0, ZMTP_GREETING_BYTES - FIRST_PART);
    rest[MINOR - FIRST_PART] = 1;
    memcpy(rest + MECHANISM - FIRST_PART, mechanism, strlen(mechanism));
    rest[AS_SERVER - FIRST_PART] = zmtp->curve != NULL && zmtp->server;
    return true;
}

static enum zmtp_event take_greeting(struct zmtp *zmtp, const uint8_t **at, const uint8_t *end)
{
    bool begins = zmtp->buffered < FIRST_PART;
    bool whole = collect(zmtp, ZMTP_GREETING_BYTES, at, end);
    const uint8_t *greeting = zmtp->buffer;
    if (!is_greeting(greeting, zmtp->buffered))
        return fail(zmtp, ZMTP_FOREIGN);
    if (begins && zmtp->buffered >= FIRST_PART && !say_mechanism(zmtp))
        return fail(zmtp, ZMTP_MALFORMED);
    if (!whole)
        return ZMTP_MORE;
    size_t name_bytes = 0;
    while (name_bytes < MECHANISM_BYTES && greeting[MECHANISM + name_bytes] != 0)
        name_bytes++;
    copy_text(zmtp->peer_mechanism, greeting + MECHANISM, name_bytes);
    if (strcmp(zmtp->peer_mechanism, zmtp->curve != NULL ? "CURVE" : "NULL") != 0)
        return fail(zmtp, ZMTP_DIFFERS);
    zmtp->buffered = 0;
    if (zmtp->curve == NULL) {
        zmtp->state = AWAITS_READY;
        return say_ready(zmtp) ? ZMTP_MORE : fail(zmtp, ZMTP_MALFORMED);
    }
    if (zmtp->server) {
        /* Two servers would wait for each other. libzmq's never says that it is one, so that two
         * clients cannot be told. */
        zmtp->state = AWAITS_HELLO;
        return greeting[AS_SERVER] & 1 ? fail(zmtp, ZMTP_MALFORMED) : ZMTP_MORE;
    }
    zmtp->state = AWAITS_WELCOME;
    size_t replied = zmtp->reply_bytes;
    uint8_t *hello = reply_command(zmtp, CURVE_HELLO_BYTES);
    if (hello == NULL)
        return fail(zmtp, ZMTP_MALFORMED);
    if (!curve_write_hello(zmtp->curve, hello)) {
        zmtp->reply_bytes = replied;
        return fail(zmtp, ZMTP_WRONG_KEY);
    }
    return ZMTP_MORE;
}

/* -- the handshake ----------------------------------------------------------------------------- */

static bool is_property(const uint8_t *name, size_t nbytes, const char *wanted)
{
    if (nbytes != strlen(wanted))
        return false;
    for (size_t i = 0; i < nbytes; i++) { /* whatever the case */
        uint8_t letter = name[i] >= 'A' && name[i] <= 'Z' ? name[i] + ('a' - 'A') : name[i];
        if (letter != (uint8_t)wanted[i])
            return false;
    }
    return true;
}

static bool is_text(const uint8_t *value, size_t nbytes, const char *wanted)
{
    return nbytes == strlen(wanted) && memcmp(value, wanted, nbytes) == 0;
}

/* Whether metadata are sound, and those of a socket that we may talk with (RFC 28). */
static bool is_suitable(const struct zmtp *zmtp, const uint8_t *at, size_t left)
{
    bool suitable = false;
    while (left > 0) {
        size_t name_bytes = at[0];
        if (name_bytes == 0 || left < 1 + name_bytes + 4)
            return false;
        const uint8_t *name = at + 1, *value = name + name_bytes + 4;
        uint32_t nbytes = (uint32_t)value[-4] << 24 | (uint32_t)value[-3] << 16 |
                          (uint32_t)value[-2] << 8 | value[-1];
        left -= 1 + name_bytes + 4;
        if (nbytes > left)
            return false;
        if (is_property(name, name_bytes, "socket-type"))
            suitable = is_text(value, nbytes, "DEALER") || is_text(value, nbytes, "ROUTER") ||
                       is_text(value, nbytes, zmtp->server ? "REQ" : "REP");
        at = value + nbytes;
        left -= nbytes;
    }
    return suitable;
}

static enum zmtp_event begin_traffic(struct zmtp *zmtp)
{
    zmtp->state = IN_TRAFFIC;
    zmtp->ready = true;
    zmtp->sealed = zmtp->curve != NULL;
    if (zmtp->curve != NULL)
        curve_end_handshake(zmtp->curve);
    return ZMTP_READY;
}

static enum zmtp_event take_error(struct zmtp *zmtp, const uint8_t *body, size_t nbytes)
{
    size_t before = sizeof ERROR_NAME; /* the name, and the length of the reason */
    if (nbytes < before || nbytes - before < body[before - 1])
        return fail(zmtp, ZMTP_MALFORMED);
    copy_text(zmtp->reason, body + before, body[before - 1]);
    return fail(zmtp, ZMTP_REFUSED);
}

static enum zmtp_event take_ready(struct zmtp *zmtp, uint8_t *body, size_t nbytes)
{
    size_t before = sizeof READY_NAME - 1;
    if (zmtp->curve != NULL) {
        enum curve_verdict verdict = curve_read_ready(zmtp->curve, body, nbytes);
        if (verdict != CURVE_OPEN)
            return fail_shut(zmtp, verdict);
        before = CURVE_READY_BYTES;
    } else if (!is_named(body, nbytes, READY_NAME)) {
        return fail(zmtp, ZMTP_MALFORMED);
    }
    if (!is_suitable(zmtp, body + before, nbytes - before))
        return fail(zmtp, ZMTP_MALFORMED);
    return begin_traffic(zmtp);
}

static enum zmtp_event take_hello(struct zmtp *zmtp, uint8_t *body, size_t nbytes)
{
    enum curve_verdict verdict = curve_read_hello(zmtp->curve, body, nbytes);
    if (verdict != CURVE_OPEN)
        return fail_shut(zmtp, verdict);
    uint8_t *welcome = reply_command(zmtp, CURVE_WELCOME_BYTES);
    if (welcome == NULL)
        return fail(zmtp, ZMTP_MALFORMED);
    curve_write_welcome(zmtp->curve, welcome);
    zmtp->state = AWAITS_INITIATE;
    return ZMTP_MORE;
}

static enum zmtp_event take_welcome(struct zmtp *zmtp, uint8_t *body, size_t nbytes)
{
    enum curve_verdict verdict = curve_read_welcome(zmtp->curve, body, nbytes);
    if (verdict != CURVE_OPEN)
        return fail_shut(zmtp, verdict);
    uint8_t metadata[METADATA_BYTES];
    size_t metadata_bytes = write_metadata(zmtp, metadata);
    size_t replied = zmtp->reply_bytes;
    uint8_t *initiate = reply_command(zmtp, CURVE_INITIATE_BYTES + metadata_bytes);
    if (initiate == NULL)
        return fail(zmtp, ZMTP_MALFORMED);
    if (!curve_write_initiate(zmtp->curve, initiate, metadata, metadata_bytes)) {
        zmtp->reply_bytes = replied;
        return fail(zmtp, ZMTP_WRONG_KEY);
    }
    zmtp->state = AWAITS_READY;
    return ZMTP_MORE;
}

static enum zmtp_event take_initiate(struct zmtp *zmtp, uint8_t *body, size_t nbytes)
{
    enum curve_verdict verdict = curve_read_initiate(zmtp->curve, body, nbytes, zmtp->peer_key);
    if (verdict != CURVE_OPEN)
        return fail_shut(zmtp, verdict);
    if (!is_suitable(zmtp, body + CURVE_INITIATE_BYTES, nbytes - CURVE_INITIATE_BYTES))
        return fail(zmtp, ZMTP_MALFORMED);
    zmtp->state = AWAITS_ADMISSION;
    return ZMTP_ADMIT;
}

enum zmtp_event zmtp_admit(struct zmtp *zmtp, bool admitted)
{
    if (zmtp->state != AWAITS_ADMISSION)
        return zmtp->state == HAS_FAILED ? ZMTP_FAILED : ZMTP_MORE;
    if (admitted)
        return say_ready(zmtp) ? begin_traffic(zmtp) : fail(zmtp, ZMTP_MALFORMED);
    uint8_t *refusal = reply_command(zmtp, sizeof REFUSAL - 1);
    if (refusal != NULL)
        memcpy(refusal, REFUSAL, sizeof REFUSAL - 1);
    return fail(zmtp, ZMTP_UNKNOWN_KEY);
}

/* Takes a header's bytes until it is whole, and finds what it says: 0 bytes of header if it is not
 * whole. False: it is none. */
static bool take_header(struct zmtp *zmtp, const uint8_t **at, const uint8_t *end,
                        size_t *header_bytes, uint64_t *body_bytes)
{
    *header_bytes = 0;
    if (!collect(zmtp, 1, at, end))
        return true;
    uint8_t flags = zmtp->buffer[0];
    if ((flags & ~FLAGS) != 0 || (flags & (FLAG_COMMAND | FLAG_MORE)) == (FLAG_COMMAND | FLAG_MORE))
        return false;
    size_t wanted = flags & FLAG_LONG ? ZMTP_HEADER_BYTES : 2;
    if (!collect(zmtp, wanted, at, end))
        return true;
    *body_bytes = flags & FLAG_LONG ? get_u64(zmtp->buffer + 1) : zmtp->buffer[1];
    *header_bytes = wanted;
    return *body_bytes >> 63 == 0 && (*body_bytes > 0 || (flags & FLAG_COMMAND) == 0);
}

static enum zmtp_event take_handshake(struct zmtp *zmtp, const uint8_t **at, const uint8_t *end)
{
    size_t header_bytes;
    uint64_t body_bytes;
    if (!take_header(zmtp, at, end, &header_bytes, &body_bytes))
        return fail(zmtp, ZMTP_MALFORMED);
    if (zmtp->buffered > 0 && (zmtp->buffer[0] & FLAG_COMMAND) == 0)
        return fail(zmtp, ZMTP_MALFORMED);
    if (header_bytes == 0)
        return ZMTP_MORE;
    if (body_bytes > ZMTP_COMMAND_BYTES)
        return fail(zmtp, ZMTP_TOO_LARGE);
    size_t nbytes = (size_t)body_bytes;
    if (!collect(zmtp, header_bytes + nbytes, at, end))
        return ZMTP_MORE;
    zmtp->buffered = 0;
    uint8_t *body = zmtp->buffer + header_bytes;
    if (is_named(body, nbytes, ERROR_NAME))
        return take_error(zmtp, body, nbytes);
    switch (zmtp->state) {
    case AWAITS_HELLO:
        return take_hello(zmtp, body, nbytes);
    case AWAITS_WELCOME:
        return take_welcome(zmtp, body, nbytes);
    case AWAITS_INITIATE:
        return take_initiate(zmtp, body, nbytes);
    default:
        return take_ready(zmtp, body, nbytes);
    }
}

/* -- frames ------------------------------------------------------------------------------------ */

static enum zmtp_event take_frame(struct zmtp *zmtp, const uint8_t **at, const uint8_t *end)
{
    size_t header_bytes;
    uint64_t nbytes;
    if (!take_header(zmtp, at, end, &header_bytes, &nbytes))
        return fail(zmtp, ZMTP_MALFORMED);
    if (header_bytes == 0)
        return ZMTP_MORE;
    uint8_t flags = zmtp->buffer[0];
    zmtp->buffered = 0;
    struct zmtp_frame *frame = &zmtp->frame;
    frame->wire_bytes = frame->nbytes = nbytes;
    frame->more = flags & FLAG_MORE;
    frame->command = flags & FLAG_COMMAND;
    uint64_t most = frame->command ? ZMTP_COMMAND_BYTES : zmtp->max_frame_bytes;
    if (zmtp->sealed) {
        /* Those flags count that are within. libzmq sends commands so as messages, too. */
        if (frame->more || nbytes < CURVE_MESSAGE_BYTES)
            return fail(zmtp, ZMTP_MALFORMED);
        frame->nbytes -= CURVE_MESSAGE_BYTES;
        frame->command = false;
        most = zmtp->max_frame_bytes > ZMTP_COMMAND_BYTES ? zmtp->max_frame_bytes
                                                          : ZMTP_COMMAND_BYTES;
    }
    return frame->nbytes > most ? fail(zmtp, ZMTP_TOO_LARGE) : ZMTP_FRAME;
}

enum zmtp_event zmtp_take(struct zmtp *zmtp, const uint8_t **at, const uint8_t *end)
{
    enum zmtp_event event = ZMTP_MORE;
    while (event == ZMTP_MORE && *at != end) {
        switch (zmtp->state) {
        case IN_GREETING:
            event = take_greeting(zmtp, at, end);
            break;
        case AWAITS_ADMISSION:
            return ZMTP_ADMIT;
        case IN_TRAFFIC:
            event = take_frame(zmtp, at, end);
            break;
        case HAS_FAILED:
            return ZMTP_FAILED;
        default:
            event = take_handshake(zmtp, at, end);
        }
    }
    return event;
}

uint8_t *zmtp_open(struct zmtp *zmtp, uint8_t *body)
{
    if (zmtp->state != IN_TRAFFIC || !zmtp->sealed)
        return NULL;
    uint8_t flags = 0;
    struct zmtp_frame *frame = &zmtp->frame;
    enum curve_verdict verdict = curve_unseal(zmtp->curve, body, frame->wire_bytes, &flags);
    if (verdict != CURVE_OPEN) {
        fail_shut(zmtp, verdict);
        return NULL;
    }
    frame->more = flags & CURVE_MORE;
    frame->command = flags & CURVE_COMMAND;
    if ((flags & ~(CURVE_MORE | CURVE_COMMAND)) != 0 || (frame->more && frame->command)) {
        fail(zmtp, ZMTP_MALFORMED);
        return NULL;
    }
    if (frame->nbytes > (frame->command ? ZMTP_COMMAND_BYTES : zmtp->max_frame_bytes)) {
        fail(zmtp, ZMTP_TOO_LARGE);
        return NULL;
    }
    return body + CURVE_MESSAGE_BYTES;
}

/* Writes a whole frame of a command to `out`, which has room for zmtp_wire_bytes. */
static size_t write_command(struct zmtp *zmtp, uint8_t *out, const uint8_t *body, size_t nbytes)
{
    size_t before;
    if (zmtp->sealed) {
        before = write_header(out, nbytes + CURVE_MESSAGE_BYTES, 0) + CURVE_MESSAGE_BYTES;
        memcpy(out + before, body, nbytes);
        curve_seal(zmtp->curve, out + before - CURVE_MESSAGE_BYTES, nbytes, CURVE_COMMAND);
    } else {
        before = write_header(out, nbytes, FLAG_COMMAND);
        memcpy(out + before, body, nbytes);
    }
    return before + nbytes;
}

/* Answers a PING with what it has brought along. Where the caller has not sent the answers to many
 * of them, the last ones are lost: any of them says that we live. */
static enum zmtp_event take_ping(struct zmtp *zmtp, const uint8_t *body, size_t nbytes)
{
    size_t before = sizeof PING_NAME - 1 + 2; /* the name, and the time to live */
    if (nbytes < before || nbytes - before > CONTEXT_BYTES)
        return fail(zmtp, ZMTP_MALFORMED);
    uint8_t pong[sizeof PONG_NAME - 1 + CONTEXT_BYTES];
    size_t name_bytes = sizeof PONG_NAME - 1, context_bytes = nbytes - before;
    memcpy(pong, PONG_NAME, name_bytes);
    memcpy(pong + name_bytes, body + before, context_bytes);
    uint8_t *room = reply_room(zmtp, zmtp_wire_bytes(zmtp, name_bytes + context_bytes));
    if (room != NULL)
        write_command(zmtp, room, pong, name_bytes + context_bytes);
    return ZMTP_MORE;
}

enum zmtp_event zmtp_command(struct zmtp *zmtp, const uint8_t *body, size_t nbytes)
{
    if (zmtp->state != IN_TRAFFIC)
        return zmtp->state == HAS_FAILED ? ZMTP_FAILED : ZMTP_MORE;
    if (nbytes == 0 || body[0] == 0 || nbytes - 1 < body[0])
        return fail(zmtp, ZMTP_MALFORMED);
    if (is_named(body, nbytes, PING_NAME))
        return take_ping(zmtp, body, nbytes);
    if (is_named(body, nbytes, ERROR_NAME))
        return take_error(zmtp, body, nbytes);
    return ZMTP_MORE;
}

size_t zmtp_frame_header(uint8_t *out, uint64_t nbytes, bool more)
{
    return write_header(out, nbytes, more ? FLAG_MORE : 0);
}

uint64_t zmtp_wire_bytes(const struct zmtp *zmtp, uint64_t nbytes)
{
    uint64_t body_bytes = nbytes + (zmtp->sealed ? CURVE_MESSAGE_BYTES : 0);
    return body_bytes + (body_bytes <= UINT8_MAX ? 2 : ZMTP_HEADER_BYTES);
}

size_t zmtp_seal(struct zmtp *zmtp, uint8_t *out, const void *body, size_t nbytes, bool more)
{
    size_t header_bytes = write_header(out, (uint64_t)nbytes + CURVE_MESSAGE_BYTES, 0);
    uint8_t *sealed = out + header_bytes;
    if (nbytes > 0)
        memcpy(sealed + CURVE_MESSAGE_BYTES, body, nbytes);
    curve_seal(zmtp->curve, sealed, nbytes, more ? CURVE_MORE : 0);
    return header_bytes + CURVE_MESSAGE_BYTES + nbytes;
}

size_t zmtp_ping(struct zmtp *zmtp, uint8_t *out, uint16_t ttl_ds)
{
    uint8_t ping[sizeof PING_NAME - 1 + 2];
    memcpy(ping, PING_NAME, sizeof PING_NAME - 1);
    ping[sizeof PING_NAME - 1] = (uint8_t)(ttl_ds >> 8);
    ping[sizeof PING_NAME] = (uint8_t)ttl_ds;
    return write_command(zmtp, out, ping, sizeof ping);
}
