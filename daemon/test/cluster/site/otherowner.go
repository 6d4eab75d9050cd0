package site

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
)

// OtherOwner is a role: an owner without GPUs whose clock is ahead, or whose program is of another version, as a
// machine has it on which one of both is wrong. It says "ready" on its standard output.
const OtherOwner = "other-owner"

func init() { node.Role(OtherOwner, otherOwner) }

// otherOwner takes the node's name, how far its clock is ahead, and a version; "" is that of the sluiced named after it.
func otherOwner(args []string) error {
	ahead, err := time.ParseDuration(args[1])
	if err != nil {
		return err
	}
	id, err := identity.New(identity.Config{Node: args[0], Auth: identity.AuthMunge})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", Control))
	if err != nil {
		return err
	}
	s := rpc.NewServer(id.Server(), args[2])
	rpc.ServeOwner(s, strange{owner: args[0], ahead: ahead, version: strings.TrimSpace(args[2])})
	fmt.Fprintln(os.Stdout, "ready")
	return s.Serve(l)
}

// strange is an owner that only says what it has.
type strange struct {
	lease.Owner
	owner   string
	ahead   time.Duration
	version string
}

func (s strange) Inventory(context.Context) (lease.Inventory, error) {
	return lease.Inventory{Owner: s.owner, Version: s.version, Time: time.Now().Add(s.ahead)}, nil
}

func (strange) List(context.Context, string) ([]lease.Status, error) { return nil, nil }

func (strange) Claim(context.Context, string, string) error               { return nil }
func (strange) Renew(context.Context, string, []string) ([]string, error) { return nil, nil }

func (strange) Reports(context.Context, string, string, string) ([]lease.Report, error) {
	return nil, nil
}
