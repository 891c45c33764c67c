//! Ranges of card numbers by issuer (IIN, ISO/IEC 7812-1), with the lengths that each network issues, and the Luhn
//! digit.
//!
//! Sources:
//!
//! - <https://en.wikipedia.org/wiki/Payment_card_number>
//! - Discover, Diners Club, JCB and UnionPay: bulletin "IIN Ranges" of the Discover Global Network
//! - Maestro and the second series of Mastercard: "Transaction Processing Rules" of Mastercard
//! - Elo, Hipercard and Mir: <https://github.com/braintree/credit-card-type>

/// A range of first digits, and the lengths of its numbers.
struct IssuerRange {
    first: &'static str,
    last: &'static str,
    /// One bit per length that the network allows.
    allowed: u32,
    /// One bit per usual length: a number in an id or a reference is judged at these lengths only.
    usual: u32,
}

const fn range(first: &'static str, last: &'static str, allowed: &[u32], usual: &[u32]) -> IssuerRange {
    IssuerRange { first, last, allowed: bits(allowed), usual: bits(usual) }
}

const fn bits(mut lengths: &[u32]) -> u32 {
    let mut bits = 0;
    while let [length, rest @ ..] = lengths {
        bits |= 1 << *length;
        lengths = rest;
    }
    bits
}

const FROM_12: [u32; 8] = [12, 13, 14, 15, 16, 17, 18, 19];
const FROM_14: [u32; 6] = [14, 15, 16, 17, 18, 19];
const FROM_16: [u32; 4] = [16, 17, 18, 19];
const SWITCH: [u32; 3] = [16, 18, 19];

const RANGES: [IssuerRange; 49] = [
    range("1", "1", &[15], &[15]),                 // UATP; JCB's old 1800 is one of them
    range("1946", "1946", &[16], &[]),             // GPN
    range("2131", "2131", &[15], &[]),             // JCB, old
    range("2200", "2204", &FROM_16, &[16]),        // Mir
    range("2205", "2205", &[16], &[16]),           // Borica
    range("2221", "2720", &[16], &[16]),           // Mastercard
    range("286900", "286900", &[16], &[16]),       // Carnet
    range("300", "305", &FROM_14, &[14, 16]),      // Diners Club
    range("3088", "3094", &FROM_16, &[16]),        // JCB
    range("3095", "3095", &FROM_14, &[14, 16]),    // Diners Club
    range("3096", "3102", &FROM_16, &[16]),        // JCB
    range("31", "31", &[19], &[]),                 // China T-Union
    range("3112", "3120", &FROM_16, &[16]),        // JCB
    range("3158", "3159", &FROM_16, &[16]),        // JCB
    range("3337", "3349", &FROM_16, &[16]),        // JCB
    range("34", "34", &[15], &[15]),               // American Express
    range("3528", "3589", &FROM_16, &[16]),        // JCB; 353, 356 with RuPay, 357111 with LankaPay
    range("36", "36", &FROM_14, &[14, 16]),        // Diners Club
    range("37", "37", &[15], &[15]),               // American Express
    range("38", "39", &FROM_14, &[14, 16]),        // Diners Club; 384100, 384140, 384160 Hipercard
    range("4", "4", &[13, 16, 19], &[16]),         // Visa; within it Elo (401178 to 457632) and Dankort (4571)
    range("4903", "4905", &SWITCH, &[16]),         // Switch
    range("4911", "4911", &SWITCH, &[16]),         // Switch
    range("4936", "4936", &SWITCH, &[16]),         // Switch
    range("50", "50", &FROM_12, &[16]), // Maestro; 5018, 5020, 5038; Dankort 5019; Elo 504175 to 509999; Verve 506099 to 507964; Meeza 5078
    range("506000", "506198", &SWITCH, &[16, 19]), // Verve
    range("507865", "507964", &SWITCH, &[16, 19]), // Verve
    range("51", "55", &[16], &[16]),    // Mastercard
    range("5614", "5614", &[16], &[16]), // UzCard
    range("56", "59", &FROM_12, &[16]), // Maestro; Bankcard 5610, 560221; Switch 564182; AfriGo 564456; Naranja 589562; Cabal 589657
    range("5893", "5893", &FROM_12, &[16, 19]), // Maestro
    range("60", "61", &FROM_12, &[16]), // Maestro; RuPay 60; Discover 6011; Hipercard 606282; UkrCard 604001; Cabal 604201
    range("62", "62", &FROM_12, &[16, 19]), // UnionPay; Discover 622126 to 622925; Elo 627780
    range("63", "64", &FROM_12, &[16]), // Maestro; Solo 6334; Elo 636297, 636368; InterPayment 636; InstaPayment 637 to 639; Discover 644 to 649
    range("6304", "6304", &FROM_12, &[16, 19]), // Laser, Maestro
    range("65", "66", &FROM_12, &[16]), // Discover, RuPay and Troy 65; Elo 650031 to 655058; Verve 650002 to 650027; Dinacard 6556
    range("67", "67", &FROM_12, &[16, 19]), // Maestro; Girocard; Laser 6706, 6709, 6771; Solo 6767; Maestro UK 6759, 676770
    range("68", "69", &FROM_12, &[16]),     // Maestro
    range("81", "81", &FROM_16, &[16, 19]), // UnionPay, RuPay
    range("82", "82", &[16], &[16]),        // RuPay
    range("8600", "8600", &[16], &[16]),    // UzCard
    range("9051", "9051", &[16], &[16]),    // ArCa
    range("9112", "9112", &[16], &[16]),    // Belkart
    range("9417", "9417", &[16], &[16]),    // Elcart
    range("9682", "9682", &[16], &[16]),    // mada
    range("9704", "9704", &[16, 19], &[16]), // Napas
    range("9792", "9792", &[16], &[16]),    // Troy
    range("9860", "9860", &[16], &[16]),    // Humo
    range("9891", "9891", &[16], &[16]),    // Dinacard
];

/// Shortest and longest card number, in digits.
pub const DIGITS: std::ops::RangeInclusive<usize> = 12..=19;

/// Which lengths of a range count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    Allowed,
    Usual,
}

/// Whether an issuer has numbers with this prefix and length, and the last digit is the Luhn digit.
pub fn is_issued(digits: &str, lengths: Lengths) -> bool {
    DIGITS.contains(&digits.len()) && luhn(digits) && RANGES.iter().any(|range| range.matches(digits, lengths))
}

impl IssuerRange {
    fn matches(&self, digits: &str, lengths: Lengths) -> bool {
        let bits = match lengths {
            Lengths::Allowed => self.allowed,
            Lengths::Usual => self.usual,
        };
        let prefix = digits.get(..self.first.len());
        bits & (1 << digits.len()) != 0 && prefix.is_some_and(|prefix| (self.first..=self.last).contains(&prefix))
    }
}

/// Luhn check of ISO/IEC 7812-1, annex B.
fn luhn(digits: &str) -> bool {
    let sum: u32 = digits
        .bytes()
        .rev()
        .enumerate()
        .map(|(place, byte)| {
            let digit = u32::from(byte - b'0');
            let weighted = if place % 2 == 1 { digit * 2 } else { digit };
            weighted / 10 + weighted % 10
        })
        .sum();
    sum.is_multiple_of(10)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The number with its Luhn digit.
    pub fn with_luhn(digits: &str) -> String {
        let numbers = (0..10).map(|last| format!("{digits}{last}"));
        numbers.into_iter().find(|number| luhn(number)).unwrap()
    }

    /// A network, first digits of its cards, and the lengths at which an id is judged; then those at which it is not.
    type Network = (&'static str, &'static [&'static str], &'static [usize], &'static [usize]);

    const NETWORKS: [Network; 32] = [
        ("Visa", &["4", "49"], &[16], &[13, 19]),
        ("Mastercard", &["51", "55", "2221", "2229", "23", "2699", "2700", "2720"], &[16], &[]),
        ("American Express", &["34", "37"], &[15], &[]),
        ("Discover", &["6011", "644", "649", "65"], &[16], &[17, 18, 19]),
        ("Diners Club", &["300", "305", "3095", "36", "38", "39"], &[14, 16], &[15, 17, 18, 19]),
        (
            "JCB",
            &["3528", "3589", "3088", "3094", "3096", "3102", "3112", "3158", "3337", "3349"],
            &[16],
            &[17, 18, 19],
        ),
        ("JCB, old", &["1800"], &[15], &[]),
        ("UnionPay", &["62", "81"], &[16, 19], &[17, 18]),
        (
            "Maestro",
            &["5018", "5020", "5038", "56", "58", "6304", "6759", "6761", "6763"],
            &[16],
            &[12, 13, 14, 15, 17, 18],
        ),
        ("Maestro of 19 digits", &["5893", "6304", "6759", "6799"], &[19], &[]),
        ("Girocard", &["6703", "6725"], &[16, 19], &[]),
        ("Mir", &["2200", "2201", "2204"], &[16], &[17, 18, 19]),
        ("Borica", &["2205"], &[16], &[]),
        ("RuPay", &["60", "65", "81", "82", "508", "353", "356"], &[16], &[]),
        ("Troy", &["9792", "65"], &[16], &[]),
        ("Hipercard", &["606282", "384100", "384140", "384160", "637095"], &[16], &[19]),
        ("Elo", &["401178", "431274", "438935", "451416", "504175", "506699", "509000"], &[16], &[]),
        ("Elo of 6", &["627780", "636297", "636368", "650031", "650405", "651652", "655000"], &[16], &[]),
        ("UATP", &["1001", "1220"], &[15], &[]),
        ("Verve", &["506000", "506099", "506198", "507865", "507964"], &[16, 19], &[18]),
        ("Dankort", &["5019", "4571"], &[16], &[]),
        ("Switch", &["4903", "4905", "4911", "4936", "564182", "633110"], &[16], &[18, 19]),
        ("InterPayment", &["636"], &[16], &[17, 18, 19]),
        ("InstaPayment", &["637", "639"], &[16], &[]),
        ("Napas", &["9704"], &[16], &[19]),
        ("UzCard", &["8600", "5614"], &[16], &[]),
        ("Humo", &["9860"], &[16], &[]),
        ("LankaPay", &["357111"], &[16], &[]),
        ("GPN", &["50", "56", "58", "60", "63"], &[16], &[18, 19]),
        ("Dinacard", &["9891"], &[16], &[]),
        ("mada", &["9682"], &[16], &[]),
        ("UkrCard, Cabal, Meeza, Naranja, Carnet", &["604001", "604201", "5078", "589562", "286900"], &[16], &[]),
    ];

    #[test]
    fn every_network_is_known_at_its_lengths() {
        for (network, prefixes, usual, others) in NETWORKS {
            for prefix in prefixes {
                let number = |length: usize| with_luhn(&format!("{prefix:0<width$}", width = length - 1));
                for length in usual.iter().chain(others) {
                    let number = number(*length);
                    assert!(is_issued(&number, Lengths::Allowed), "{network} {number}");
                    assert_eq!(is_issued(&number, Lengths::Usual), usual.contains(length), "{network} {number}");
                    let (body, last) = number.split_at(number.len() - 1);
                    let other = (last.parse::<u32>().unwrap() + 1) % 10;
                    assert!(!is_issued(&format!("{body}{other}"), Lengths::Allowed), "{network} {body}{other}");
                }
            }
        }
    }

    #[test]
    fn unassigned_prefixes_and_lengths_are_not_issued() {
        for (prefix, length) in [
            ("0", 16),
            ("1", 16),
            ("20", 16),
            ("2199", 16),
            ("2206", 16),
            ("2220", 16),
            ("2721", 16),
            ("32", 16),
            ("3527", 16),
            ("359", 16),
            ("7", 16),
            ("80", 16),
            ("83", 16),
            ("90", 16),
            ("99", 16),
            ("4", 15),
            ("4", 14),
            ("51", 15),
            ("34", 16),
            ("37", 14),
            ("36", 13),
            ("1", 14),
            ("1", 19),
            ("4", 20),
            ("62", 11),
        ] {
            let number = with_luhn(&format!("{prefix:0<width$}", width = length - 1));
            assert!(!is_issued(&number, Lengths::Allowed), "{number}");
        }
    }
}
