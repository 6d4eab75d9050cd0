package wire

import "fmt"

// ControlName names a control operation for messages.
func ControlName(op uint16) string {
	if op >= OpControl && int(op) < OpControl+len(controlNames) && controlNames[op-OpControl] != "" {
		return controlNames[op-OpControl]
	}
	return fmt.Sprintf("operation %#04x", op)
}

// Decode reads the header of a frame from client to worker and checks it.
func (m *Request) Decode(b *[RequestSize]byte) error {
	m.get(b)
	switch {
	case m.Size > MaxPayload:
		return fmt.Errorf("wire: %s frame of %d bytes: the limit is %d: %w", ControlName(m.Op), m.Size, MaxPayload, ErrRange)
	case m.Flags&^FlagWait != 0:
		return fmt.Errorf("wire: %s frame has unknown flags %#x", ControlName(m.Op), m.Flags)
	case (m.Flags&FlagWait != 0) != (m.Call != 0):
		return fmt.Errorf("wire: %s frame has call %d but flags %#x", ControlName(m.Op), m.Call, m.Flags)
	}
	return nil
}

// Decode reads the header of a frame from worker to client and checks the size.
func (m *Reply) Decode(b *[ReplySize]byte) error {
	m.get(b)
	if m.Size > MaxPayload {
		return fmt.Errorf("wire: frame of kind %d has %d bytes: the limit is %d: %w", m.Kind, m.Size, MaxPayload, ErrRange)
	}
	return nil
}
