package worker

import "errors"

// writeParts sends parts from the device until the connection ends.
func (o *outStaging) writeParts(c *bulkConn) error {
	var b [1]byte
	for {
		if err := c.read(b[:]); !errors.Is(err, errIdle) {
			return err
		}
	}
}
