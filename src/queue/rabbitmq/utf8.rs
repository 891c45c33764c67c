//! A filter that makes text UTF-8 as it passes, in pieces of any size, without changing its length.
//!
//! Text that is UTF-8 passes unchanged, and bytes that have passed are final. So a first byte of several that has room
//! for the others makes the bytes behind it such others, and one that has none becomes a question mark.
//! <https://www.unicode.org/versions/Unicode16.0.0/core-spec/chapter-3/#G27506>, table 3-7

const REPLACEMENT: u8 = b'?';

/// The continuation bytes that a character still needs, and between what the next of them lies.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Utf8Repair {
    missing: u64,
    least: u8,
    most: u8,
}

impl Utf8Repair {
    /// `behind`: bytes of the text that come after these.
    pub fn repair(&mut self, bytes: &mut [u8], behind: u64) {
        if self.missing == 0 && bytes.is_ascii() {
            return;
        }
        let mut left = behind + bytes.len() as u64;
        for byte in bytes {
            left -= 1;
            if self.missing > 0 {
                *byte = if (self.least..=self.most).contains(byte) { *byte } else { self.least };
                (self.missing, self.least, self.most) = (self.missing - 1, 0x80, 0xbf);
                continue;
            }
            *self = match *byte {
                0xc2..=0xdf => Self { missing: 1, least: 0x80, most: 0xbf },
                0xe0 => Self { missing: 2, least: 0xa0, most: 0xbf },
                0xed => Self { missing: 2, least: 0x80, most: 0x9f },
                0xe1..=0xef => Self { missing: 2, least: 0x80, most: 0xbf },
                0xf0 => Self { missing: 3, least: 0x90, most: 0xbf },
                0xf1..=0xf3 => Self { missing: 3, least: 0x80, most: 0xbf },
                0xf4 => Self { missing: 3, least: 0x80, most: 0x8f },
                _ => Self::default(),
            };
            if !byte.is_ascii() && (self.missing == 0 || self.missing > left) {
                (*byte, *self) = (REPLACEMENT, Self::default());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mended(text: &[u8], piece: usize) -> Vec<u8> {
        let (mut utf8, mut bytes, mut behind) = (Utf8Repair::default(), text.to_vec(), text.len());
        for chunk in bytes.chunks_mut(piece) {
            behind -= chunk.len();
            utf8.repair(chunk, behind as u64);
        }
        bytes
    }

    #[test]
    fn invalid_utf8_is_replaced_at_equal_length() {
        for (text, expected) in [
            (&b"plain"[..], "plain"),
            (b"caf\xe9", "caf?"),
            (b"\xff\xfe", "??"),
            (b"\x80\xbfa", "??a"),
            (b"\xc3(", "\u{c0}"),
            (b"\xc3", "?"),
            (b"\xc0\xaf", "??"),
            // A surrogate, and one beyond the last character.
            (b"\xed\xa0\x80", "\u{d000}"),
            (b"\xf4\x90\x80\x80", "\u{100000}"),
            (b"\xf5\x80\x80\x80", "????"),
        ] {
            for piece in [1, 2, 255] {
                assert_eq!(String::from_utf8(mended(text, piece)).unwrap(), expected, "{text:x?} in pieces of {piece}");
            }
        }
    }

    proptest! {
        #[test]
        fn sanitizer_keeps_valid_text_and_replaces_invalid(
            text in ".{0,40}",
            bytes in prop::collection::vec(any::<u8>(), 0..60),
            piece in 1_usize..9,
        ) {
            prop_assert_eq!(mended(text.as_bytes(), piece), text.as_bytes());
            let mended = mended(&bytes, piece);
            prop_assert_eq!(mended.len(), bytes.len());
            prop_assert!(std::str::from_utf8(&mended).is_ok(), "{:x?} became {:x?}", bytes, mended);
        }
    }
}
