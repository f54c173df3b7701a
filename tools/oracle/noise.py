#!/usr/bin/env python3
"""The noise of sampling (docs/verification.md, section 2), written from the text: prints the table of
tests/test_spec.c, test_noise_of_the_twin. Plain Python, nothing to install.

    python3 tools/oracle/noise.py
"""
MASK = 0xffffffff
DRAFT, ACCEPT, RESIDUAL, BONUS = 1, 2, 3, 4


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., SC 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xd2511f53 * c[0], 0xcd9e8d57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9e3779b9) & MASK, (k[1] + 0xbb67ae85) & MASK]
    return c


def uniform(seed, sequence, position, purpose, block):
    own = philox([sequence & MASK, sequence >> 32, 0x6b657973, block >> 32],
                 [seed & MASK, seed >> 32])
    bits = philox([position & MASK, position >> 32, purpose, block & MASK], own[:2])
    return ((bits[0] >> 5) * 2**26 + (bits[1] >> 6)) * 2.0**-53


if __name__ == "__main__":
    for key in [(0, 0, 0, DRAFT, 0), (20251, 7, 100, DRAFT, 100), (20251, 7, 102, DRAFT, 100),
                (20251, 7, 102, DRAFT, 101), (20251, 7, 102, ACCEPT, 100),
                (0x123456789abcdef, 0xfedcba9876543210, 0x1234567890, RESIDUAL, 0x123456788a),
                (1, 2**63, 2**40 + 3, BONUS, 2**40)]:
        print("        {{%s}, %s}," % (", ".join(hex(v) for v in key), uniform(*key).hex()))
