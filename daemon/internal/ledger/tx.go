package ledger

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"strconv"

	bolt "go.etcd.io/bbolt"
)

// Tx is a view of the ledger, and in Update a change. It ends with the function
// that it was given to.
type Tx struct {
	tx      *bolt.Tx
	l       *Ledger
	changed digest // what the change does to the digest
	added   int    // records more, or fewer if negative
}

// Put writes v as JSON.
func (t *Tx) Put(b Bucket, key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("ledger %s: %s %q: %w", t.l.path, b, key, err)
	}
	if err := t.forget(b, key); err != nil {
		return err
	}
	t.changed.toggle(b, key, raw)
	t.added++
	if len(key) > maxKey || 4+len(raw) > maxRecord {
		return fmt.Errorf("ledger %s: %s: record of %d bytes with a key of %d: too large", t.l.path, b, len(raw), len(key))
	}
	rec := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(raw)), sum(b, key, raw))
	if err := t.tx.Bucket([]byte(b)).Put([]byte(key), append(rec, raw...)); err != nil {
		return fmt.Errorf("ledger %s: %s %q: %w", t.l.path, b, key, err)
	}
	return nil
}

// Get reads a record into v, and says whether there is one.
func (t *Tx) Get(b Bucket, key string, v any) (bool, error) {
	rec := t.tx.Bucket([]byte(b)).Get([]byte(key))
	if rec == nil {
		return false, nil
	}
	raw, err := t.l.open(b, key, rec)
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return false, fmt.Errorf("ledger %s: %s %q: %w: %w; %s", t.l.path, b, key, ErrCorrupt, err, remedy)
	}
	return true, nil
}

// Delete removes a record, if it is there.
func (t *Tx) Delete(b Bucket, key string) error {
	if err := t.forget(b, key); err != nil {
		return err
	}
	if err := t.tx.Bucket([]byte(b)).Delete([]byte(key)); err != nil {
		return fmt.Errorf("ledger %s: %s %q: %w", t.l.path, b, key, err)
	}
	return nil
}

// forget takes a record that is about to go out of the digest.
func (t *Tx) forget(b Bucket, key string) error {
	rec := t.tx.Bucket([]byte(b)).Get([]byte(key))
	if rec == nil {
		return nil
	}
	raw, err := t.l.open(b, key, rec)
	if err != nil {
		return err
	}
	t.changed.toggle(b, key, raw)
	t.added--
	return nil
}

// All calls f for each record in the order of the keys. raw is good until f
// returns.
func (t *Tx) All(b Bucket, f func(key string, raw json.RawMessage) error) error {
	return t.tx.Bucket([]byte(b)).ForEach(func(k, rec []byte) error {
		if len(k) > maxKey { // a damaged page can claim gigabytes
			return fmt.Errorf("ledger %s: %s: %w: a key of %d bytes; %s", t.l.path, b, ErrCorrupt, len(k), remedy)
		}
		raw, err := t.l.open(b, string(k), rec)
		if err != nil {
			return err
		}
		return f(string(k), raw)
	})
}

// Enqueue keeps v in the outbox with this change, and returns its number. Once v
// is where it belongs, Flushed says so; after a crash Queued finds what is left.
func (t *Tx) Enqueue(v any) (uint64, error) {
	seq, err := t.tx.Bucket([]byte(Outbox)).NextSequence()
	if err != nil {
		return 0, fmt.Errorf("ledger %s: outbox: %w", t.l.path, err)
	}
	return seq, t.Put(Outbox, outboxKey(seq), v)
}

// Dequeue takes an entry back.
func (t *Tx) Dequeue(seq uint64) error { return t.Delete(Outbox, outboxKey(seq)) }

// Queued calls f for each entry of the outbox, the oldest first.
func (t *Tx) Queued(f func(seq uint64, raw json.RawMessage) error) error {
	return t.All(Outbox, func(key string, raw json.RawMessage) error {
		seq, err := strconv.ParseUint(key, 16, 64)
		if err != nil {
			return fmt.Errorf("ledger %s: outbox %q: %w: no number; %s", t.l.path, key, ErrCorrupt, remedy)
		}
		return f(seq, raw)
	})
}

func outboxKey(seq uint64) string { return fmt.Sprintf("%016x", seq) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(b Bucket, key string, raw []byte) uint32 {
	h := crc32.Update(0, castagnoli, []byte(string(b)+"\x00"+key+"\x00"))
	return crc32.Update(h, castagnoli, raw)
}

// open checks a record and returns its JSON.
func (l *Ledger) open(b Bucket, key string, rec []byte) (json.RawMessage, error) {
	if len(rec) < 4 || len(rec) > maxRecord || binary.BigEndian.Uint32(rec) != sum(b, key, rec[4:]) || !json.Valid(rec[4:]) {
		return nil, fmt.Errorf("ledger %s: %s %q: %w: the checksum is wrong; %s", l.path, b, key, ErrCorrupt, remedy)
	}
	return rec[4:], nil
}
