//! The messages of MPI: a header of fixed length, then bytes of a channel.

use dcp_collectives::mesh::{Kind, Opening};

/// Bytes of the header of a packet.
pub(crate) const HEADER: usize = 24;

/// A channel between two processes: the number that its opener gave it, and who that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChannelId {
    pub(crate) number: u32,
    /// Whether the process that sends the packet opened the channel.
    pub(crate) is_mine: bool,
}

impl ChannelId {
    /// Returns this channel as the other side names it.
    pub(crate) fn mirrored(self) -> Self {
        Self { is_mine: !self.is_mine, ..self }
    }
}

/// The contents of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// Opens a channel.
    Open(Opening),
    /// Bytes of a channel follow.
    Data,
    /// The reader has consumed so many bytes.
    Credit(u64),
    /// The sender writes no more.
    Finish,
    /// The sender neither writes nor reads any more.
    Cut,
    /// A packet of so many bytes has left the sender's memory.
    Received(u64),
}

impl Head {
    /// The packet with these bytes.
    pub(crate) fn packet(self, channel: ChannelId, bytes: &[u8]) -> Vec<u8> {
        let (code, kind, number, rank, world_size) = match self {
            Self::Open(Opening { group, world_size, rank, kind: Kind::Control }) => {
                (1, 0, group, rank, world_size)
            }
            Self::Open(Opening { group, world_size, rank, .. }) => (1, 1, group, rank, world_size),
            Self::Data => (2, 0, 0, 0, 0),
            Self::Credit(bytes) => (3, 0, bytes, 0, 0),
            Self::Finish => (4, 0, 0, 0, 0),
            Self::Cut => (5, 0, 0, 0, 0),
            Self::Received(bytes) => (6, 0, bytes, 0, 0),
        };
        let mut packet = Vec::with_capacity(HEADER + bytes.len());
        packet.extend([code, kind, u8::from(channel.is_mine), 0]);
        packet.extend(channel.number.to_le_bytes());
        packet.extend(number.to_le_bytes());
        packet.extend(rank.to_le_bytes());
        packet.extend(world_size.to_le_bytes());
        packet.extend_from_slice(bytes);
        packet
    }

    /// Reads the contents of a packet and its channel, as the receiver names it. `None` for bytes that are no
    /// packet.
    pub(crate) fn parse(packet: &[u8]) -> Option<(ChannelId, Self)> {
        let (header, _) = packet.split_first_chunk::<HEADER>()?;
        let [code, kind, is_mine, _, rest @ ..] = *header;
        let [c0, c1, c2, c3, n0, n1, n2, n3, n4, n5, n6, n7, rest @ ..] = rest;
        let [r0, r1, r2, r3, w0, w1, w2, w3] = rest;
        let number = u64::from_le_bytes([n0, n1, n2, n3, n4, n5, n6, n7]);
        let head = match code {
            1 => Self::Open(Opening {
                group: number,
                world_size: u32::from_le_bytes([w0, w1, w2, w3]),
                rank: u32::from_le_bytes([r0, r1, r2, r3]),
                kind: if kind == 0 { Kind::Control } else { Kind::Data },
            }),
            2 => Self::Data,
            3 => Self::Credit(number),
            4 => Self::Finish,
            5 => Self::Cut,
            6 => Self::Received(number),
            _ => return None,
        };
        let channel =
            ChannelId { number: u32::from_le_bytes([c0, c1, c2, c3]), is_mine: is_mine != 0 };
        Some((channel.mirrored(), head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_round_trip_and_the_receiver_sees_the_other_side() {
        let opening = Opening { group: u64::MAX, world_size: 9, rank: 8, kind: Kind::Data };
        let channel = ChannelId { number: 7, is_mine: true };
        let heads = [
            Head::Open(opening),
            Head::Open(Opening { kind: Kind::Control, ..opening }),
            Head::Data,
            Head::Credit(1 << 40),
            Head::Finish,
            Head::Cut,
            Head::Received(3),
        ];
        for head in heads {
            let packet = head.packet(channel, b"abc");
            assert_eq!(Head::parse(&packet), Some((channel.mirrored(), head)));
            assert_eq!(&packet[HEADER..], b"abc");
        }
    }

    #[test]
    fn bytes_that_are_no_packet_are_refused() {
        assert_eq!(Head::parse(&[1; HEADER - 1]), None);
        assert_eq!(Head::parse(&[0xff; 100]), None);
    }
}
