package rpc

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec below
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// few is gRPC's codec for a message whose field 1 is a list of at most max: a longer one is refused before any of it is
// made. An empty message takes two bytes on the way and a hundred in memory.
type few struct {
	encoding.CodecV2
	max  int
	over bool // a message was refused
}

func newFew(maximum int) *few { return &few{CodecV2: encoding.GetCodecV2("proto"), max: maximum} }

// Unmarshal implements encoding.CodecV2.
func (f *few) Unmarshal(data mem.BufferSlice, v any) error {
	n := 0
	for rest := data.Materialize(); len(rest) > 0; {
		field, _, size := protowire.ConsumeField(rest)
		if size < 0 {
			return protowire.ParseError(size)
		}
		if field == 1 {
			n++
		}
		if n > f.max {
			f.over = true
			return fmt.Errorf("a list of more than %d", f.max)
		}
		rest = rest[size:]
	}
	return f.CodecV2.Unmarshal(data, v)
}
