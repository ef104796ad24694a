"""andrea_ablate: which transformer design choices matter, by how much, and how sure are we?"""
