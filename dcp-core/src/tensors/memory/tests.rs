//! Loans of owned, foreign and borrowed memory.

use super::*;

#[test]
fn disjoint_ranges_are_lent_at_once() {
    let memory = HostMemory::zeroed(10);
    let mut a = memory.lend(0..4).unwrap();
    let mut b = memory.lend(4..10).unwrap();
    a.fill(1);
    b.fill(2);
    assert_eq!(memory.lend(3..5).unwrap_err(), LoanError::InUse { start: 3, end: 5 });
    assert!(memory.read().is_err());
    drop((a, b));
    assert_eq!(memory.to_vec().unwrap(), [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
}

#[test]
fn clones_are_the_same_memory_and_copies_are_not() {
    let memory = HostMemory::zeroed(4);
    assert!(memory.is_same(&memory.clone()));
    assert!(!memory.is_same(&HostMemory::zeroed(4)));
}

#[test]
fn readers_exclude_writers() {
    let memory = HostMemory::from_vec(vec![7; 4]);
    let bytes = memory.read().unwrap();
    let slice = bytes.slice(1..2);
    drop(bytes);
    assert!(memory.lend(0..1).is_err(), "a slice of the loan is still out");
    drop(slice);
    assert!(memory.lend(0..1).is_ok());
}

#[test]
fn split_buffers_return_their_own_ranges() {
    let memory = HostMemory::zeroed(6);
    let mut rest = memory.lend(0..6).unwrap();
    let front = rest.split_to(2);
    assert_eq!((front.len(), rest.len()), (2, 4));
    drop(front);
    assert!(memory.lend(0..2).is_ok());
    assert!(memory.lend(2..3).is_err());
    let empty = rest.split_to(0);
    drop((empty, rest));
    assert!(memory.lend(0..6).is_ok());
}

#[test]
fn parts_of_a_divided_buffer_return_its_range_together() {
    let memory = HostMemory::zeroed(7);
    let mut parts = memory.lend(1..7).unwrap().divide([2, 0, 3]);
    for (number, part) in (1..).zip(&mut parts) {
        part.fill(number);
    }
    let mut last = parts.pop().unwrap();
    let front = last.split_to(1);
    assert_eq!((&*front, &*last), (&[3][..], &[3, 3][..]));
    drop(parts);
    assert!(memory.lend(0..2).is_err(), "a part is out");
    assert!(memory.lend(0..1).is_ok());
    let frozen = last.freeze();
    drop(front);
    assert!(memory.read().is_err());
    drop(frozen);
    assert_eq!(memory.read().unwrap(), [0, 1, 1, 3, 3, 3, 0][..]);
    assert!(memory.lend(2..6).unwrap().divide([]).is_empty());
    assert!(memory.lend(0..7).is_ok());
}

#[test]
#[should_panic(expected = "a part of 3 bytes of the last 2")]
fn a_buffer_is_not_divided_beyond_its_end() {
    let _ = Buffer::zeroed(4).divide([2, 3]);
}

#[test]
fn loans_outlive_the_memory() {
    let memory = HostMemory::from_vec(vec![1, 2, 3]);
    let mut buffer = memory.lend(1..3).unwrap();
    drop(memory);
    buffer[0] = 9;
    assert_eq!(buffer.freeze(), [9, 3][..]);
}

#[test]
fn immutable_and_empty_memory() {
    let memory = HostMemory::from_bytes(Bytes::from_static(b"abc"));
    assert_eq!(memory.lend(0..1).unwrap_err(), LoanError::ReadOnly);
    assert_eq!(memory.read().unwrap(), b"abc"[..]);
    let empty = HostMemory::zeroed(0);
    let _reader = empty.read().unwrap();
    assert!(empty.lend(0..0).is_ok());
    assert!(empty.lend(0..1).is_err());
}

#[test]
fn a_buffer_as_memory_lends_its_range_until_its_last_loan_ends() {
    let arena = HostMemory::zeroed(8);
    let part = HostMemory::from(arena.lend(2..6).unwrap());
    let mut front = part.lend(0..1).unwrap();
    part.lend(1..4).unwrap().copy_from_slice(&[2, 3, 4]);
    front[0] = 1;
    assert!(part.lend(3..5).is_err());
    drop(part);
    assert!(arena.lend(5..6).is_err(), "a loan of the part is still out");
    assert!(arena.lend(6..8).is_ok());
    drop(front);
    assert_eq!(arena.read().unwrap(), [0, 0, 1, 2, 3, 4, 0, 0][..]);
    assert!(HostMemory::from(arena.lend(3..3).unwrap()).is_empty());
}
